"""Rows with the places they have in their source, so that a message can name one."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specheads.errors import UserError

if TYPE_CHECKING:
    import datasets  # slow to import, so imported where it is used

SURROGATE = re.compile("[\ud800-\udfff]")


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
        """Yield ("line 3", row) and so on; columns other than `fields`, such as images, are not decoded."""
        rows = self.rows if isinstance(self.rows, list) else self.rows.select_columns([f for f in fields if f in self.fields])
        for number, row in enumerate(rows, self.first):
            yield f"{self.row_name} {number}", row


def check_values(row: Mapping, fields: Sequence[str], path: str, place: str, seen: dict[str, tuple[str, str]]) -> None:
    """Raise UserError unless the fields of a row are texts or numbers, as they were in the rows before.

    Args:
        path, place: the data set and which row of it this is, for messages.
        seen: each field's first type and its place; filled in here.
    """
    for field in fields:
        value = row.get(field)
        if value is None:
            continue
        kind, what = kind_of(value), f"data.path={path!r}, {place}: the field {field!r}"
        first_kind, first_place = seen.setdefault(field, (kind, place))
        if kind != first_kind:
            raise UserError(f"{what} is {kind}, but {first_kind} in {first_place}; write all of them alike.")
        if kind not in ("a text", "a number"):
            raise UserError(f"{what} is {kind}; prompts are made of texts and numbers, so convert it.")
        if isinstance(value, str) and SURROGATE.search(value):
            raise UserError(f"{what} holds half a character (a lone surrogate); fix or remove it.")


def kind_of(value: object) -> str:
    """Return the type of a value in words; integers and other numbers have the same one, because both are written as they are."""
    names = {str: "a text", int: "a number", float: "a number", bool: "true or false", dict: "an object", list: "a list"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
