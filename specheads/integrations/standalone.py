"""A head's folder with a loader of its own: one Python file beside the weights that needs torch and safetensors, not this project.

The file is put together from the source of what it does here, so that there is one place where a head is computed.
"""

import ast
import inspect
from pathlib import Path
from types import ModuleType

from specheads.files import write_whole
from specheads.heads import calibration, network
from specheads.integrations import standalone_head

FILE = "acceptance_head.py"


def write_standalone(folder: Path) -> Path:
    """Write the loader into a head's folder; return its path."""
    path = folder / FILE
    write_whole(path, lambda temporary: temporary.write_text(standalone_source()))
    return path


def standalone_source() -> str:
    """Return the loader as text."""
    imports: set[str] = set()
    parts = [
        *_definitions(network, imports),
        *_definitions(calibration, imports, names={"calibrated"}),
        *_definitions(standalone_head, imports),
    ]
    own = sorted(line for line in imports if "specheads" not in line)
    plain = [line for line in own if line.startswith("import ")]
    return "\n".join(
        [
            f'"""{inspect.getdoc(standalone_head)}\n\nWritten by specheads; Apache-2.0.\n"""\n',
            *plain,
            *(line for line in own if line not in plain),
            "\n\n" + "\n\n\n".join(parts),
            "",
        ]
    )


def _definitions(module: ModuleType, imports: set[str], names: set[str] | None = None) -> list[str]:
    """Return the source of a module's definitions, all or some; adds the lines of its imports that what is taken needs."""
    source = inspect.getsource(module)
    found, used = [], set()
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.FunctionDef | ast.ClassDef) and (
            names is None or getattr(node, "name", None) in names
        ):
            start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            found.append("\n".join(source.splitlines()[start - 1 : node.end_lineno]))
            used |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name.split(".")[0]) in used:
                    imports.add(
                        f"from {node.module} import {alias.name}" if isinstance(node, ast.ImportFrom) else f"import {alias.name}"
                    )
    return found
