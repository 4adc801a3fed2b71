"""The sources of prompts that the keys of `data` describe: a data set, or functions of this
machine's standard library.
"""

import ast
import contextlib
import hashlib
import inspect
import os
import platform
import sys
import sysconfig
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from specheads.errors import UserError, is_count
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.prompt import FINAL, SPLITS, Prompt, check_some, text_id
from specheads.settings import Count, argument, check_arguments, unknown_key
from specheads.storage.files import noted

# Shares of the library's files; the embedded pairs were trained on the rest.
_DEV_SHARE = 0.50
_TEST_SHARE = 0.25
_DEV_FILES = 0.12  # share of the held-out "dev" files whose prompts are the head's dev set

# Test prompts that recipes were compared on: data.num_test is no more, and the final split begins
# after them.
NUM_READ = 300
# Final prompts of one file at most: a few files have hundreds of functions, which resemble each
# other
FINAL_PER_FILE = 30
NUM_PARTS = 10

_INDENT = "    "
_MAX_PROMPT_CHARS = 1_000
_MAX_BODY_CHARS = 4_000
_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "__pycache__",
    "lib2to3",
    "_vendor",
    "vendored",
}


@dataclass(frozen=True)
class NanoSource:
    """`data=nano`: functions of this machine's standard library that no embedded pair was trained
    on.

    Train and dev prompts come from its dev files, test prompts from its test files; no file is in
    two splits. The final split holds the prompts of the test files after the first NUM_READ, in
    NUM_PARTS parts. The part of a prompt depends on its text alone, so parts are nearly the same
    under every Python version.
    """

    num_train: Count = argument(
        ..., "the number of train prompts, from dev files; fewer where there are not as many"
    )
    num_dev: Count = argument(..., "the number of dev prompts, from other dev files")
    num_test: Count = argument(
        ...,
        "the number of test prompts, from test files, at most 300: the final split follows them",
    )
    num_final: Count | None = argument(
        None, "the number of final prompts; null: all of the parts that final_part names"
    )
    final_part: int | Sequence[int] | None = argument(
        None,
        "a part of the final split, 0 to 9, or a list of parts; null: none. A part is read once,"
        " when a figure is published; benchmarks/final_parts.json lists the parts that were read",
        object,
    )

    def __post_init__(self) -> None:
        check_arguments(self, "data")
        check_some(self.num_train, self.num_dev, self.num_test, self.num_final or 0)
        for part in self.final_parts:
            if not is_count(part) or part >= NUM_PARTS or self.final_parts.count(part) > 1:
                raise UserError(
                    f"data.final_part={self.final_part} must be a part of the final split: a number"
                    f" from 0 to {NUM_PARTS - 1}, or a list of different ones."
                )
        if self.num_test > NUM_READ:
            raise UserError(
                f"data.num_test={self.num_test} reaches into the final prompts; it must be at most"
                f" {NUM_READ}."
            )

    def check_final(self) -> None:
        if not self.final_parts or self.num_final == 0:
            raise UserError(
                f"split={FINAL} needs final prompts; name a part that no result has read, for"
                f" example data.final_part={NUM_PARTS - 1}, and leave data.num_final=null."
            )

    @property
    def final_parts(self) -> list[int]:
        if isinstance(self.final_part, Sequence) and not isinstance(self.final_part, str):
            return list(self.final_part)
        return [] if self.final_part is None else [self.final_part]

    def provenance(self) -> dict[str, str]:
        """Return what decides the prompts together with the keys of data: Python's version, for its
        standard library.
        """
        return {"python": platform.python_version()}

    def load(self, chats: bool, responses: bool = False) -> Iterator[Prompt]:
        """Yield prompts in a fixed order that looks random, code to continue for every pair.

        `responses` are bodies.
        """
        wanted = {"train": self.num_train, "dev": self.num_dev, "test": self.num_test}
        prompts = _prompts(responses)
        for split in SPLITS:
            yield from prompts[split][: wanted[split]]
        # A text that dev files hold too, on which heads are trained, is no final prompt.
        known = {prompt.prompt_id for prompt in (*prompts["train"], *prompts["dev"])}
        per_file: Counter[str | None] = Counter()
        final = []
        for prompt in prompts["test"][NUM_READ:]:
            if prompt.prompt_id not in known:
                per_file[prompt.group] += 1
                if (
                    per_file[prompt.group] <= FINAL_PER_FILE
                    and int(prompt.prompt_id, 16) % NUM_PARTS in self.final_parts
                ):
                    final.append(replace(prompt, split=FINAL))
        yield from final[: self.num_final]


def _prompts(responses: bool) -> dict[str, list[Prompt]]:
    """Return all prompts of the standard library by split, sorted by their ids."""
    prompts: dict[str, dict[str, Prompt]] = {split: {} for split in SPLITS}
    for side in ("dev", "test"):
        for function in standard_library(side):
            split = side
            if side == "dev" and _position("head ", function.source) >= _DEV_FILES:
                split = "train"
            prompt_id = text_id(function.prompt)
            # A prompt that several files share belongs to the first of them by name, in whatever
            # order they are read.
            known = prompts[split].get(prompt_id)
            group = min(function.source, (known and known.group) or function.source)
            prompts[split][prompt_id] = Prompt(
                prompt_id, split, function.prompt, function.body if responses else None, group
            )
    ordered = {}
    for split, of_split in prompts.items():
        ordered[split] = [of_split[prompt_id] for prompt_id in sorted(of_split)]
    return ordered


def _position(salt: str, name: str) -> float:
    """Return a number from 0 to 1 that looks random and depends on the two texts alone."""
    return int.from_bytes(hashlib.sha256(f"{salt}{name}".encode()).digest()[:4], "big") / 2**32


@dataclass(frozen=True)
class Function:
    """One function: `prompt` ends with a newline, `body` is indented by four spaces.

    `source` names its file.
    """

    prompt: str
    body: str
    source: str

    @property
    def key(self) -> str:
        """A fingerprint of the body that ignores comments and layout.

        Equal bodies are duplicates.
        """
        return hashlib.sha256(ast.dump(ast.parse(textwrap.dedent(self.body))).encode()).hexdigest()


def split_of(module_path: str) -> str:
    """Return `train`, `dev` or `test` for a standard-library file, by a hash of its path
    (`json/decoder.py`).
    """
    position = _position("", module_path)
    if position < _DEV_SHARE:
        return "dev"
    return "test" if position < _DEV_SHARE + _TEST_SHARE else "train"


def _functions_in(source: str, name: str) -> Iterator[Function]:
    """Yield the documented functions and methods of one file's text.

    Yields nothing where Python cannot parse it.
    """
    try:
        with warnings.catch_warnings():
            # Invalid escapes in other people's files are not our business.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines()
    nodes = list(tree.body)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            nodes += node.body
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            function := _function(node, lines, name)
        ):
            yield function


def _function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], name: str
) -> Function | None:
    docstring = ast.get_docstring(node)
    if not docstring or len(node.body) < 2 or node.body[0].lineno == node.lineno:
        return None
    documented = node.body[0]
    body = node.body[1]
    if body.lineno == documented.end_lineno or _is_placeholder(body):
        return None
    header = textwrap.dedent("\n".join(lines[node.lineno - 1 : documented.lineno - 1])).rstrip()
    code = "\n".join(lines[documented.end_lineno : node.end_lineno])
    code = textwrap.indent(
        textwrap.dedent(code).strip("\n"), _INDENT, lambda line: bool(line.strip())
    )
    summary = (
        inspect.cleandoc(docstring)
        .split("\n\n")[0]
        .strip()
        .replace("\\", "\\\\")
        .replace('"""', "'''")
    )
    quoted = textwrap.indent(f'"""{summary}"""', _INDENT)
    function = Function(prompt=f"{header}\n{quoted}\n", body=code + "\n", source=name)
    if len(function.prompt) > _MAX_PROMPT_CHARS or len(code) > _MAX_BODY_CHARS:
        return None
    try:
        ast.parse(function.prompt + function.body)
    except (SyntaxError, ValueError):
        return None
    return function


def _is_placeholder(first: ast.stmt) -> bool:
    """Whether a body that begins so is only a placeholder (`pass`, `...`, `raise
    NotImplementedError`).
    """
    if isinstance(first, ast.Raise):
        return "NotImplemented" in ast.dump(first)
    return isinstance(first, ast.Pass) or (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    )


@cache
def standard_library(split: str) -> Sequence[Function]:
    """Return the de-duplicated functions of this interpreter's train, dev or test files, parsed
    once per machine.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = dict[str, Path]()
    for folder, subfolders, names in os.walk(root):
        # Not walked at all: some are large.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            place = path.relative_to(root).as_posix()
            if split_of(place) == split:
                files[place] = path
    named = sorted(files.items())
    sizes = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in named]
    key = [split, sys.version, Path(__file__).read_text(), *sizes]

    def parse() -> list[tuple[str, str, str]]:
        by_body: dict[str, Function] = {}
        for name, path in named:
            # A file that is not UTF-8 is left out.
            with contextlib.suppress(UnicodeDecodeError, OSError):
                for function in _functions_in(path.read_text(encoding="utf-8"), name):
                    # Some bodies are parsed only inside their function.
                    with contextlib.suppress(SyntaxError):
                        by_body.setdefault(function.key, function)
        return [astuple(function) for function in by_body.values()]

    return tuple(Function(*values) for values in noted("functions", key, parse))


PromptSource: TypeAlias = NanoSource | DatasetSource
# Keys of `data` that are the responses', not the source's.
_LIMITS = (
    "max_new_tokens",
    "max_prompt_tokens",
)


def source_class(data: Mapping[str, object]) -> type[PromptSource]:
    """Return the class of the source of the keys of `data`: a data set where they have a `path`, or
    else NanoSource.
    """
    return DatasetSource if "path" in data else NanoSource


def prompt_source(data: Mapping[str, Any]) -> PromptSource:
    """Return the source of the keys of `data`.

    Raises UserError for mistakes that show before data is read.
    """
    kind = source_class(data)
    values = {name: value for name, value in data.items() if name not in _LIMITS}
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in values if name not in known]:
        raise unknown_key(f"data.{unknown[0]}", values[unknown[0]], [*known, *_LIMITS])
    try:
        return kind(**values)
    except TypeError as error:
        raise UserError(
            f"data: {str(error).partition(' ')[2]}; give them, or choose a prompt set with data=."
        ) from None
