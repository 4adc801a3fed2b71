"""The quality of responses on the console, in 80 columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from specheads.evaluation.intervals import Interval
from specheads.evaluation.quality_columns import (
    ABOUT_QUALITY,
    QUALITY_TITLE,
    Column,
    comparisons,
    quality_columns,
)
from specheads.evaluation.report import LiveRow, Report


def quality_parts(report: Report, style: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the tables with their explanations, where there is something to show; `style` is that of tables."""
    if columns := quality_columns(report):
        yield _table(QUALITY_TITLE, columns, report.live, style)
        yield from map(escape, comparisons(report))
        yield ABOUT_QUALITY


def _table(title: str, columns: Sequence[Column], rows: Sequence[LiveRow], style: Mapping[str, Any]) -> Table:
    table = Table(title=f"{title}, with 95 % intervals over prompts", **style)
    table.add_column("setting", min_width=14)
    for column in columns:
        table.add_column(column.name.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(escape(row.name), *(_cell(column.value(row), column.digits) for column in columns))
    return table


def _cell(estimate: Interval | None, digits: int) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.value:.{digits}f}\n\u00b1{(estimate.high - estimate.low) / 2:.{digits}f}"
