"""The page's section on the quality of responses."""

from collections.abc import Iterator, Sequence
from typing import Any

from specheads.evaluation.intervals import Interval
from specheads.evaluation.page.tables import Cell, Row, Table
from specheads.evaluation.quality_columns import (
    ABOUT_QUALITY,
    QUALITY_TITLE,
    Column,
    comparisons,
    quality_columns,
)
from specheads.evaluation.report import LiveRow, Report


def quality_sections(report: Report) -> Iterator[dict[str, Any]]:
    """Yield the sections that are not empty, each with the values that its template needs."""
    if columns := quality_columns(report):
        tables = [_table("How likely responses are under the target", columns, report.live)]
        yield _section("quality", QUALITY_TITLE, [ABOUT_QUALITY, *comparisons(report)], tables)


def _section(key: str, title: str, texts: Sequence[str], tables: Sequence[Table]) -> dict[str, Any]:
    return {"key": key, "title": title, "template": "quality.html", "texts": texts, "tables": tables}


def _table(caption: str, columns: Sequence[Column], rows: Sequence[LiveRow]) -> Table:
    cells = [[_name(row), *(_cell(column.value(row), column.digits) for column in columns)] for row in rows]
    return Table(caption, ["setting", *(column.name for column in columns)], [Row(each) for each in cells], sorted_by=-1)


def _name(row: LiveRow) -> Cell:
    return Cell(row.name, row.name, lossy=not row.lossless)


def _cell(estimate: Interval | None, digits: int) -> Cell:
    if estimate is None:
        return Cell(None)
    return Cell(f"{estimate.value:.{digits}f}", estimate.value, f"±{(estimate.high - estimate.low) / 2:.{digits}f}")
