"""The one kind of table, which a terminal and the pages of reports show.

The templates of pages render it, too, and a page copies it as Markdown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

LEAST_TEXT = 26  # columns of the terminal for a text
SEPARATOR = 2  # columns of the terminal between two columns of a table
LONG_HEADING = (
    10  # characters; the words of a longer one than this and the cells are below each other
)


@dataclass(frozen=True)
class Cell:
    """A cell of a table: a text (None: unknown), or a number with its limits, and the key to sort
    it by.
    """

    text: str | None
    key: float | str | None = None
    limits: str | None = None
    # A short remark; rows whose first cell is the best or a bound look different
    tag: str | None = None


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its heading."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    sorts: bool = False  # whether a click on a heading sorts it
    doubtful: bool = False  # whether its figures are unreliable

    @classmethod
    def of_texts(cls, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> "Table":
        """Return a table of texts; those after the first column are numbers."""
        cells = []
        for heading, *texts in rows:
            cells.append([Cell(heading, heading), *map(Cell, texts)])
        return cls("", columns, cells)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table, dimmed where its figures are unreliable."""
    console = console or Console(highlight=False)
    for part in terminal(table, console.width, "dim" if table.doubtful else ""):
        console.print(part)


@dataclass(frozen=True)
class _Column:
    """A column of a table for a terminal."""

    heading: str
    cells: Sequence[str]
    is_text: bool  # it is folded, and numbers are aligned to the right

    @property
    def longest_line(self) -> int:
        return max(map(len, "\n".join([self.heading, *self.cells]).split("\n")))

    @property
    def width(self) -> int:
        return min(self.longest_line, LEAST_TEXT) if self.is_text else self.longest_line


def terminal(table: Table, width: int, style: str = "") -> Iterator[RichTable]:
    """Yield a table for a terminal of some width: as many tables as its columns need, each with the
    first column.
    """
    first, *rest = _columns(table)
    needed = sum(SEPARATOR + column.width for column in rest)
    first_width = min(first.longest_line, max(width // 3, width - needed))
    title = escape(table.caption) or None
    while rest:
        shown = [rest.pop(0)]
        used = first_width + SEPARATOR + shown[0].width
        while rest and used + SEPARATOR + rest[0].width <= width:
            used += SEPARATOR + rest[0].width
            shown.append(rest.pop(0))
        part = RichTable(
            title=title,
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
            row_styles=[style],
        )
        part.add_column(escape(first.heading), overflow="fold", max_width=first_width)
        for column in shown:
            part.add_column(
                escape(column.heading),
                justify="left" if column.is_text else "right",
                no_wrap=not column.is_text,
                overflow="fold",
            )
        for cells in zip(first.cells, *(column.cells for column in shown), strict=True):
            part.add_row(*map(escape, cells))
        yield part
        title = None


def _columns(table: Table) -> list[_Column]:
    columns = []
    for number, name in enumerate(table.columns):
        is_long = number > 0 and len(name) > LONG_HEADING
        heading = name.replace(" ", "\n") if is_long else name
        cells = [row[number] for row in table.rows]
        is_text = any(isinstance(cell.key, str) for cell in cells)
        columns.append(_Column(heading, [_lines(cell) for cell in cells], is_text))
    return columns


def _lines(cell: Cell) -> str:
    """Return a cell's text, and below it its limits and remarks."""
    text = "-" if cell.text is None else cell.text.replace("\u00a0", " ")
    return "\n".join(part for part in (text, cell.limits, cell.tag) if part)
