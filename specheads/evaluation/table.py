"""One record of a table for every reader: templates show it on the page, `terminal` on the console, `plain_rows` in logs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

from specheads.evaluation.conclusions import (
    change,
    change_limits,
    minus,
    percent,
    percent_limits,
    share_text,
    times,
    times_limits,
)
from specheads.evaluation.intervals import LEVELS, Interval


@dataclass(frozen=True)
class Cell:
    """A cell of a table: a text (None: unknown), or a number with its limits, and the key to sort it by."""

    text: str | None
    key: float | str | None = None
    limits: str | None = None
    kind: str = ""  # doubtful
    tag: str | None = None  # a short remark
    lossy: bool = False
    breaks: bool = False  # whether the text may break after an underscore

    @property
    def parts(self) -> list[str]:
        """The text in parts, between which a line may break."""
        text = self.text or ""
        return text.replace("_", "_\n").split("\n") if self.breaks and "\n" not in text else [text]


@dataclass(frozen=True)
class Row:
    """A row of a table; its first cell is a heading."""

    cells: Sequence[Cell]
    kind: str = ""  # best, bound


@dataclass(frozen=True)
class Table:
    """A table of the page.

    With `sorted_by`, the number of the column that rows are sorted by (-1: none), a click on a heading sorts the table.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]
    sorted_by: int | None = None


def unbroken(text: str) -> str:
    """Return text whose percent signs stay next to their numbers."""
    return text.replace(" %", "\u00a0%")


def number_cell(value: float | None, digits: int) -> Cell:
    """Return a number, with a minus sign where it is negative."""
    return Cell(None) if value is None else Cell(minus(f"{value:,.{digits}f}"), value)


def times_cell(estimate: Interval | None) -> Cell:
    """Return a factor with its interval."""
    return Cell(None) if estimate is None else Cell(times(estimate), estimate.value, times_limits(estimate))


def change_cell(estimate: Interval | None) -> Cell:
    """Return a ratio as a change in percent, with its interval."""
    return Cell(None) if estimate is None else Cell(change(estimate), estimate.value, change_limits(estimate))


def cost_cell(share: float | None) -> Cell:
    """Return a cost in percent."""
    return Cell(None) if share is None else Cell(share_text(share).replace(" ", "\u00a0"), share)


def share_cell(estimate: Interval | None) -> Cell:
    """Return a share in percent, with its interval."""
    return Cell(None) if estimate is None else Cell(percent(estimate), estimate.value, percent_limits(estimate))


def levels_cell(milliseconds: Mapping[str, float]) -> Cell:
    """Return the percentiles of a time, sorted by the first."""
    levels = [f"p{level}" for level in LEVELS]
    return Cell(" / ".join(f"{milliseconds[name]:.1f}" for name in levels), milliseconds[levels[0]])


def spread_cell(estimate: Interval | None, digits: int = 3) -> Cell:
    """Return an estimate with half the width of its interval."""
    if estimate is None:
        return Cell(None)
    return Cell(f"{estimate.value:.{digits}f}", estimate.value, f"±{(estimate.high - estimate.low) / 2:.{digits}f}")


def speed_cell(estimate: Interval | None) -> Cell:
    """Return tokens per second with their interval."""
    if estimate is None:
        return Cell(None)
    return Cell(f"{estimate.value:,.1f}", estimate.value, f"[{estimate.low:,.1f}, {estimate.high:,.1f}]")


SEPARATOR = 2  # columns of the terminal between two columns of a table


def terminal(table: Table, width: int, style: str = "") -> Iterator[RichTable]:
    """Yield a table for a terminal of some width: as many tables as its columns need, each with the first column."""
    lines = [[_lines(cell) for cell in row.cells] for row in table.rows]
    headings = [column.replace(" ", "\n") if len(column) > 10 else column for column in table.columns]
    widths = [
        max(len(line) for text in (heading, *(row[number] for row in lines)) for line in text.split("\n"))
        for number, heading in enumerate(headings)
    ]
    first = min(widths[0], width // 3)
    columns = list(range(1, len(widths)))
    caption: str | None = table.caption
    while columns:
        used, shown = first, list[int]()
        while columns and (not shown or used + SEPARATOR + widths[columns[0]] <= width):
            used += SEPARATOR + widths[columns[0]]
            shown.append(columns.pop(0))
        part = RichTable(
            title=caption and escape(caption), box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, row_styles=[style]
        )
        part.add_column(escape(headings[0]), overflow="fold", max_width=first)
        for number in shown:
            part.add_column(escape(headings[number]), justify="right", overflow="fold")
        for row in lines:
            part.add_row(*(escape(row[number]) for number in (0, *shown)))
        yield part
        caption = None


def _lines(cell: Cell) -> str:
    """Return a cell's text, and below it its limits and remarks."""
    remarks = [cell.limits, "lossy" if cell.lossy else None, cell.tag]
    return "\n".join(["-" if cell.text is None else cell.text.replace("\u00a0", " "), *(each for each in remarks if each)])


def plain_rows(table: Table) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of plain values: the number that a cell is sorted by, and its limits where a column has any."""
    limited = [any(row.cells[number].limits is not None for row in table.rows) for number in range(len(table.columns))]
    names = [
        name for column, more in zip(table.columns, limited, strict=True) for name in (column, f"{column}, limits")[: 1 + more]
    ]
    rows = [
        [
            value
            for cell, more in zip(row.cells, limited, strict=True)
            for value in (cell.text if cell.key is None else cell.key, cell.limits)[: 1 + more]
        ]
        for row in table.rows
    ]
    return names, rows
