"""Calls that can run what a file or a model says, listed in source code."""

import ast
from collections.abc import Iterable

# By module, the functions that run code from their input; a name alone is a builtin.
RUNS_CODE = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "marshal.load",
    "marshal.loads",
    "shelve.open",
    "dill.load",
    "dill.loads",
    "cloudpickle.load",
    "cloudpickle.loads",
    "joblib.load",
    "pandas.read_pickle",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.jit.load",
    "torch.hub.load",
    "code.interact",
}
# By the end of a name, an argument, the value with which the call is harmless, and whether that is
# the default.
DEPENDS = {
    "torch.load": ("weights_only", True, False),  # which depends on the version
    "numpy.load": ("allow_pickle", False, True),
    "from_pretrained": ("trust_remote_code", False, True),
}


def dangerous_calls(text: str) -> list[str]:
    """Return the dangerous calls of a Python source, by full name, in order of lines."""
    tree = ast.parse(text)
    names = dict(_imported(tree))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [(call.lineno, name) for call in calls for name in _dangerous(call, names)]
    return [name for _, name in sorted(found)]


def _imported(tree: ast.AST) -> Iterable[tuple[str, str]]:
    """Yield the names that imports bind, with what they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (alias.asname or alias.name.partition(".")[0], alias.asname and alias.name)
                for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names
            )


def _dangerous(call: ast.Call, names: dict[str, str]) -> Iterable[str]:
    name = _full_name(call.func, names)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in RUNS_CODE:
        yield name
    shell = given.get("shell")
    if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
        yield f"{name}(shell)"
    for ending, (argument, harmless, by_default) in DEPENDS.items():
        if name == ending or name.endswith(f".{ending}"):
            value = given.get(argument)
            constant = value.value if isinstance(value, ast.Constant) else None
            # A setting of the user.
            may_be_asked = ending == "from_pretrained" and value is not None and constant is None
            if not may_be_asked and not (by_default if value is None else constant is harmless):
                yield f"{ending}({argument})"


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, names)}.{node.attr}"
    return (names.get(node.id) or node.id) if isinstance(node, ast.Name) else ""
