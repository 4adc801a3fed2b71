"""Rows with the places that they have in their source, so that a message can name one; JSON, CSV and text files as rows.

Local files are parsed here, because inference of column types would change prompts (a date, a "007" and an "NA" are text in a
prompt) and because a message can then name the line.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specheads.errors import UserError

if TYPE_CHECKING:
    import datasets  # slow to import, so imported where it is used

SURROGATE = re.compile("[\ud800-\udfff]")
FIELD = re.compile(r"(?P<column>[^.\[\]]+)(?P<parts>(\[[^\[\]]+\])*)")  # "input", "translation[de]", "turns[0]"


@dataclass(frozen=True)
class Table:
    """Rows in order. `row_name` is the name of a row in its source ("line"), `first` the number of the first row there."""

    rows: "list[dict] | datasets.Dataset"
    row_name: str = "row"
    first: int = 1

    @property
    def fields(self) -> list[str]:
        if isinstance(self.rows, list):
            return list(dict.fromkeys(field for row in self.rows for field in row))
        return self.rows.column_names

    def part(self, start: int, stop: int) -> "Table":
        rows = self.rows[start:stop] if isinstance(self.rows, list) else self.rows.select(range(start, stop))
        return Table(rows, self.row_name, self.first + start)

    def numbered(self, fields: Sequence[str]) -> Iterator[tuple[str, dict]]:
        """Yield ("line 3", row) and so on; columns that `fields` do not name, such as images, are not decoded."""
        columns = dict.fromkeys(column for field in fields if (column := column_of(field)) in self.fields)
        rows = self.rows if isinstance(self.rows, list) else self.rows.select_columns(list(columns))
        for number, row in enumerate(rows, self.first):
            yield f"{self.row_name} {number}", row


def column_of(field: str) -> str:
    """Return the column that a field is, or is a part of."""
    return field.partition("[")[0]


def value_at(row: Mapping, field: str) -> object:
    """Return the value of a field of a row: of "turns[0]" the first of a list; None where the row has no such part."""
    value = row.get(column_of(field))
    for part in re.findall(r"\[([^\[\]]+)\]", field):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, Sequence) and not isinstance(value, str) and re.fullmatch(r"-?\d+", part):
            place = int(part)
            value = value[place] if -len(value) <= place < len(value) else None
        else:
            return None
    return value


def check_values(row: Mapping, fields: Sequence[str], path: str, place: str, seen: dict[str, tuple[str, str]]) -> None:
    """Raise UserError unless the fields of a row are texts or numbers, as they were in the rows before.

    Args:
        path, place: the data set and which row of it this is, for messages.
        seen: each field's first type and its place; filled in here.
    """
    for field in fields:
        value = value_at(row, field)
        if value is None:
            continue
        kind, what = kind_of(value), f"data.path={path!r}, {place}: the field {field!r}"
        first_kind, first_place = seen.setdefault(field, (kind, place))
        if kind != first_kind:
            raise UserError(f"{what} is {kind}, but {first_kind} in {first_place}; write all of them alike.")
        if kind not in ("a text", "a number"):
            raise UserError(f"{what} is {kind}; prompts are made of texts and numbers, so {_part_of(field, value)}.")
        if isinstance(value, str) and SURROGATE.search(value):
            raise UserError(f"{what} holds half a character (a lone surrogate); fix or remove it.")


def _part_of(field: str, value: object) -> str:
    """Return what to do about a field with a value that is no text: to name a part of it where it has parts."""
    first = next(iter(value), None) if isinstance(value, Mapping) else 0 if isinstance(value, list) and value else None
    return "convert it" if first is None else f"name a part of it, such as {{{field}[{first}]}}"


def kind_of(value: object) -> str:
    """Return the type of a value in words; integers and other numbers have the same one, because both are written as they are."""
    names = {str: "a text", int: "a number", float: "a number", bool: "true or false", dict: "an object", list: "a list"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


EXAMPLE = '{"instruction": "..."}'


def read_file(path: str, file: Path) -> Table:
    """Return the rows of a .json, .jsonl, .csv or .txt file; `path` is its name in messages, and has the suffix.

    Raises:
        UserError: text that is not UTF-8, or not in the format of the suffix; the message names the line.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # with or without the mark that Windows puts first
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _at(path, line, f"not UTF-8 ({error.reason}); save the file as UTF-8") from None
    return {".csv": _parse_csv, ".txt": _parse_text}.get(Path(path).suffix.lower(), _parse_json)(path, text)


def _parse_text(path: str, text: str) -> Table:
    return Table([{"text": line} for line in text.removesuffix("\n").split("\n")], row_name="line")


def _parse_csv(path: str, text: str) -> Table:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    rows: list[dict] = []
    try:
        for row in reader:
            if None in row:  # where csv puts what is beyond the header
                expected = len(reader.fieldnames or ())
                cells = expected + len(row[None])
                raise _at(
                    path, reader.line_num, f"{cells} cells under a header of {expected}; put quotes around texts with commas"
                )
            rows.append(row)
    except csv.Error as error:
        raise _at(path, reader.line_num + 1, f"no CSV ({error}); check its quotes") from None
    return Table(rows)


def _parse_json(path: str, text: str) -> Table:
    """Parse an array of objects, or one object per line; a blank line is an empty row, so that rows count as lines do."""
    if text.lstrip().startswith("["):
        return _parse_json_array(path, text)
    rows = []
    for number, line in enumerate(text.rstrip().split("\n"), 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            if number == 1 and _is_json(text):
                raise UserError(
                    f"data.path={path!r} holds one JSON value over several lines; expected an array of objects, or one object "
                    f"per line, such as {EXAMPLE}."
                ) from None
            raise _at(
                path, number, f"no JSON ({error.msg} at column {error.colno}); expected one object per line, such as {EXAMPLE}"
            ) from None
        if not isinstance(row, dict):
            raise _at(path, number, f"{kind_of(row)} instead of an object; expected one per line, such as {EXAMPLE}")
        rows.append(row)
    return Table(rows if any(rows) else [], row_name="line")


def _parse_json_array(path: str, text: str) -> Table:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise _at(
            path, error.lineno, f"no JSON ({error.msg} at column {error.colno}); expected an array of objects such as [{EXAMPLE}]"
        ) from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(
                f"data.path={path!r}, row {number}: {kind_of(row)} instead of an object; expected an array such as [{EXAMPLE}]."
            )
    return Table(rows)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _at(path: str, line: int, problem: str) -> UserError:
    return UserError(f"data.path={path!r}, line {line}: {problem}.")
