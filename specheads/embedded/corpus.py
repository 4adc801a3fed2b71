"""The text that embedded pairs are trained on: documented Python functions that are already on the machine.

A sample is a *prompt* (signature and the docstring's first paragraph) and a *body*, the shape of HumanEval. Files are
split before anything is trained: the standard library by a hash of the module path, so that every Python version agrees;
this project's own dependencies go to the training side only. `data=nano` reads the held-out side at run time.
"""

import ast
import contextlib
import hashlib
import inspect
import json
import os
import re
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from specheads.storage.files import cache_folder, write_whole

INDENT = "    "
MAX_PROMPT_CHARS, MAX_BODY_CHARS = 1_000, 4_000
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "_vendor", "vendored"}
# Share of standard-library files per split; the rest trains the pair.
DEV_SHARE, TEST_SHARE = 0.50, 0.25
PERMISSIVE = re.compile(
    r"\b(MIT|MIT-CMU|BSD|0BSD|Apache|PSF|Python Software Foundation|CNRI-Python|HPND|ISC|Zlib|BSL-1\.0|CC0-1\.0|Unlicense)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Function:
    """One function: `prompt` ends with a newline, `body` is indented by four spaces; `source` names its file."""

    prompt: str
    body: str
    source: str

    @property
    def key(self) -> str:
        """A fingerprint of the body that ignores comments and layout; equal bodies are duplicates."""
        return hashlib.sha256(ast.dump(ast.parse(textwrap.dedent(self.body))).encode()).hexdigest()


def split_of(module_path: str) -> str:
    """Return `train`, `dev` or `test` for a standard-library file, by a hash of its path (`json/decoder.py`)."""
    position = int.from_bytes(hashlib.sha256(module_path.encode()).digest()[:4], "big") / 2**32
    if position < DEV_SHARE:
        return "dev"
    return "test" if position < DEV_SHARE + TEST_SHARE else "train"


def functions_in(source: str, name: str) -> Iterator[Function]:
    """Yield the documented functions and methods of one file's text; yields nothing where Python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files are not our business
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines()
    scopes: list[ast.Module | ast.ClassDef] = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for scope in scopes:
        for node in scope.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function = _function(node, lines, name)
                if function is not None:
                    yield function


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], name: str) -> Function | None:
    docstring = ast.get_docstring(node)
    if not docstring or len(node.body) < 2 or node.body[0].lineno == node.lineno:
        return None
    documented, body = node.body[0], node.body[1]
    if body.lineno == documented.end_lineno or _is_placeholder(node.body[1:]):
        return None
    header = textwrap.dedent("\n".join(lines[node.lineno - 1 : documented.lineno - 1])).rstrip()
    code = "\n".join(lines[documented.end_lineno : node.end_lineno])
    code = textwrap.indent(textwrap.dedent(code).strip("\n"), INDENT, lambda line: bool(line.strip()))
    summary = inspect.cleandoc(docstring).split("\n\n")[0].strip().replace("\\", "\\\\").replace('"""', "'''")
    quoted = textwrap.indent(f'"""{summary}"""', INDENT)
    function = Function(prompt=f"{header}\n{quoted}\n", body=code + "\n", source=name)
    if len(function.prompt) > MAX_PROMPT_CHARS or len(code) > MAX_BODY_CHARS or not _parses(function):
        return None
    return function


def _is_placeholder(body: list[ast.stmt]) -> bool:
    """Whether a body is only a placeholder (`pass`, `...`, `raise NotImplementedError`)."""
    first = body[0]
    if isinstance(first, ast.Raise):
        return "NotImplemented" in ast.dump(first)
    return isinstance(first, ast.Pass) or (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant))


def _parses(function: Function) -> bool:
    try:
        ast.parse(function.prompt + function.body)
    except (SyntaxError, ValueError):
        return False
    return True


def deduplicated(functions: Iterable[Function], seen: set[str], prompts: Container[str] = ()) -> Iterator[Function]:
    """Yield the functions whose body is not in `seen`, adding each to it, and whose prompt is not one of `prompts`."""
    for function in functions:
        try:
            key = function.key
        except SyntaxError:
            continue
        if key not in seen and function.prompt not in prompts:
            seen.add(key)
            yield function


def read_functions(files: Iterable[tuple[Path, str]]) -> Iterator[Function]:
    """Yield every documented function of `(path, name)` pairs; files that are not UTF-8 are left out."""
    for path, name in files:
        try:
            source = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        yield from functions_in(source, name)


def standard_library(split: str) -> Sequence[Function]:
    """Return the de-duplicated functions of this interpreter's standard library on one side of the split."""
    return _functions_under(Path(sysconfig.get_path("stdlib")), split)


@cache
def _functions_under(root: Path, split: str) -> tuple[Function, ...]:
    """Return the functions of a split, which are parsed once per machine and then read from the cache folder."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]  # not walked at all: some are large
        files += [Path(folder) / name for name in names if name.endswith(".py")]
    named = sorted((path.relative_to(root).as_posix(), path) for path in files)
    named = [(name, path) for name, path in named if split_of(name) == split]
    provenance = [
        sys.version,
        Path(__file__).read_text(),
        *((name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in named),
    ]
    kept = cache_folder() / "embedded" / f"{split}-{hashlib.sha256(repr(provenance).encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):  # missing or damaged
        return tuple(Function(*values) for values in json.loads(kept.read_text()))
    functions = tuple(deduplicated(read_functions((path, name) for name, path in named), set()))
    with contextlib.suppress(OSError):  # a full disk, or a folder that cannot be written
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, lambda temporary: temporary.write_text(json.dumps([astuple(function) for function in functions])))
    return functions


def dependencies(project: str = "specheads") -> list[tuple[metadata.Distribution, str]]:
    """Return `(distribution, licence)` for the project's installed dependencies, direct and not, by name.

    Distributions whose stated licence is not a permissive one are left out.
    """
    installed: dict[str, metadata.Distribution] = {}
    queue = [project]
    while queue:
        for line in metadata.requires(queue.pop()) or ():
            requirement = Requirement(line)
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not wanted or name in installed:
                continue
            try:
                installed[name] = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                continue
            queue.append(name)
    pairs = [(installed[name], licence_of(installed[name])) for name in sorted(installed)]
    return [(distribution, licence) for distribution, licence in pairs if is_permissive(licence)]


def is_permissive(licence: str) -> bool:
    """Whether every part of a licence statement, split at `AND` and `;`, offers a permissive licence."""
    return all(PERMISSIVE.search(part) for part in re.split(r"\bAND\b|;", licence))


def licence_of(distribution: metadata.Distribution) -> str:
    """Return the licence a distribution states in its metadata, or an empty string."""
    fields = distribution.metadata
    if fields["License-Expression"]:
        return fields["License-Expression"]
    classifiers = [line.rsplit(" :: ", 1)[1] for line in fields.get_all("Classifier", ()) if line.startswith("License ::")]
    stated = (fields["License"] or "").strip().splitlines()
    return "; ".join(classifiers) or (stated[0][:80] if stated else "")


def distribution_files(distribution: metadata.Distribution) -> Iterator[tuple[Path, str]]:
    """Yield `(path, name)` of a distribution's Python files, without its tests and vendored copies of others."""
    for file in sorted(distribution.files or (), key=str):
        if file.suffix == ".py" and not SKIPPED_FOLDERS.intersection(file.parts) and ".." not in file.parts:
            path = Path(str(file.locate()))
            if path.is_file():
                yield path, file.as_posix()
