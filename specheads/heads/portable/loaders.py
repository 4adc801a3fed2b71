"""Python files in a head's folder that decode with it where this project is not installed, put
together from its sources.
"""

import ast
import inspect
from pathlib import Path

from specheads.heads import calibration, features
from specheads.heads.portable import (
    assisted,
    custom_generate,
    network,
    standalone_head,
    tensor_file,
)
from specheads.pair import sampling
from specheads.storage.files import write_whole

STANDALONE = "acceptance_head.py"
CUSTOM_GENERATE = "custom_generate/generate.py"
REQUIREMENTS = (  # transformers looks at them before it runs the file
    "transformers>=5.17,<6\nsafetensors\n"
)
HEAD = (
    sampling.at_least_float32,
    sampling.SoftmaxSums,
    sampling.softmax_sums,
    features,
    network,
    calibration.calibrated,
    tensor_file,
    standalone_head,
)
# The parts of each file: modules and functions; the docstring of the last module is the file's.
PARTS = {STANDALONE: HEAD, CUSTOM_GENERATE: (*HEAD, assisted, custom_generate)}


def write_loader(folder: Path, name: str) -> Path:
    """Write a loader into a head's folder; return its path."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    write_whole(path, lambda temporary: temporary.write_text(loader_source(name)))
    if name == CUSTOM_GENERATE:
        write_whole(
            path.with_name("requirements.txt"), lambda temporary: temporary.write_text(REQUIREMENTS)
        )
    return path


def loader_source(name: str) -> str:
    """Return the text of a loader: the imports of its parts, except those of this project, and what
    follows them in each part.
    """
    imports = set()
    texts = []
    for part in PARTS[name]:
        source = inspect.getsource(part)
        end = 0
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                end = node.end_lineno or 0
                imports |= {
                    ast.unparse(type(node)(**{**vars(node), "names": [alias]}))
                    for alias in node.names
                }
        texts.append("\n".join(source.splitlines()[end:]).strip())
    lines = sorted(line for line in imports if not line.startswith("from specheads"))
    head = f'"""{inspect.getdoc(PARTS[name][-1])}\n\nWritten by specheads; Apache-2.0.\n"""\n'
    return "\n\n\n".join(["\n".join([head, *lines]), *texts]) + "\n"
