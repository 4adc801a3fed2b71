"""Python files in a head's folder that decode with it where this project is not installed.

Each is put together from sources of this project, so the computation of a head and the decision to stop a draft are written once.
"""

import ast
import inspect
from pathlib import Path
from types import ModuleType

from specheads.heads import calibration, features
from specheads.heads.portable import assisted, custom_generate, network, standalone_head, tensor_file
from specheads.pair import sampling
from specheads.storage.files import write_whole

STANDALONE, CUSTOM_GENERATE = "acceptance_head.py", "custom_generate/generate.py"
REQUIREMENTS = "transformers>=5.17,<6\nsafetensors\n"  # transformers looks at them before it runs the file
HEAD = (
    (sampling, {"at_least_float32"}),
    (features, None),
    (network, None),
    (calibration, {"calibrated"}),
    (tensor_file, {"checksum_of", "read_tensors"}),
    (standalone_head, None),
)
# The parts of each file: modules, whole or some of their definitions; the docstring of the last module is the file's.
PARTS = {
    STANDALONE: HEAD,
    CUSTOM_GENERATE: (
        *HEAD,
        (assisted, None),
        (custom_generate, None),
    ),
}


def write_loader(folder: Path, name: str) -> Path:
    """Write a loader into a head's folder; return its path."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    write_whole(path, lambda temporary: temporary.write_text(loader_source(name)))
    if name == CUSTOM_GENERATE:
        write_whole(path.with_name("requirements.txt"), lambda temporary: temporary.write_text(REQUIREMENTS))
    return path


def loader_source(name: str) -> str:
    """Return the text of a loader."""
    imports: set[str] = set()
    definitions = [part for module, names in PARTS[name] for part in _definitions(module, names, imports)]
    plain = sorted(line for line in imports if line.startswith("import "))
    about = inspect.getdoc(PARTS[name][-1][0])
    head = f'"""{about}\n\nWritten by specheads; Apache-2.0.\n"""\n'
    return "\n".join([head, *plain, *sorted(imports - set(plain)), "\n\n" + "\n\n\n".join(definitions), ""])


def _definitions(module: ModuleType, names: set[str] | None, imports: set[str]) -> list[str]:
    """Return the source of a module's definitions, all or those named.

    The import lines that they need are added to `imports`, except imports of this project.
    """
    source = inspect.getsource(module)
    sources, used = [], set()
    tree = ast.parse(source)
    for node in tree.body:
        defines = isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef)
        if defines and (names is None or getattr(node, "name", None) in names):
            start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            sources.append("\n".join(source.splitlines()[start - 1 : node.end_lineno]))
            used |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    for node in tree.body:
        internal = isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "specheads"
        if isinstance(node, ast.Import | ast.ImportFrom) and not internal:
            for alias in node.names:
                if (alias.asname or alias.name.split(".")[0]) in used:
                    imports.add(
                        f"from {node.module} import {alias.name}" if isinstance(node, ast.ImportFrom) else f"import {alias.name}"
                    )
    return sources
