"""The comments of a YAML file, at its head and by key. They explain keys that no class of settings has."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import yaml

PACKAGE = re.compile(r"# @package (\S+)")


@dataclass(frozen=True)
class Comments:
    """The comments of one YAML file: at its head, and by dotted key, "" where a key has none."""

    head: str
    keys: dict[str, str]


def read_comments(text: str, package: str = "_global_") -> Comments:
    """Return the comments of a YAML file; `package` is where its keys belong unless a `# @package` line says otherwise.

    A key's comment is in separate lines above the key, with the key's indentation, or after the key, where it may continue in
    lines below, in the same column.
    """
    lines = text.splitlines()
    head = _head(lines)
    body = [""] * len(head) + lines[len(head) :]  # what is at the head explains no key
    package = next((match[1] for line in head if (match := PACKAGE.fullmatch(line))), package)
    keys = _commented(yaml.compose(text), body, () if package == "_global_" else (package,))
    return Comments(read_head(text), dict(keys))


def read_head(text: str) -> str:
    """Return the comment at the head of a YAML file."""
    head = [line for line in _head(text.splitlines()) if not PACKAGE.fullmatch(line)]
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in head)


def _head(lines: Sequence[str]) -> list[str]:
    return list(takewhile(lambda line: line.startswith("#"), lines))


def _commented(node: yaml.Node | None, lines: Sequence[str], parents: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, comment) of a mapping and the mappings in it."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*parents, key.value)
            end = value.end_mark if value.end_mark.line == key.end_mark.line else key.end_mark
            yield ".".join(path), " ".join([*_above(lines, key.start_mark), *_after(lines, end)])
            yield from _commented(value, lines, path)


def _above(lines: Sequence[str], key: yaml.Mark) -> list[str]:
    return _column(reversed(lines[: key.line]), key.column)[::-1]


def _after(lines: Sequence[str], end: yaml.Mark) -> list[str]:
    column = lines[end.line].find("#", end.column)
    return [lines[end.line][column + 1 :].strip(), *_column(lines[end.line + 1 :], column)] if column >= 0 else []


def _column(lines: Iterable[str], column: int) -> list[str]:
    """Return the comments of the first lines that have nothing but one, in this column."""
    return [line[column + 1 :].strip() for line in takewhile(lambda line: line.startswith(" " * column + "#"), lines)]
