"""The page of a simulation: the Pareto front of throughput against speed per user, and the table of every load."""

from collections.abc import Mapping, Sequence
from typing import Any

from specheads.evaluation.intervals import Interval
from specheads.evaluation.page.document import context_section, front_section, rendered
from specheads.evaluation.page.front import FrontPoint, front_figures
from specheads.evaluation.page.tables import Cell, Row, Table, change_cell, levels_cell, number_cell
from specheads.evaluation.serving.study import LoadTable, PolicyRow

COLUMNS = (
    *("policy", "value", "tok/s", "over fixed K", "of a user", "ms p50 / p90 / p99", "first ms p50 / p90 / p99"),
    *("tok/round", "discard", "draft steps", "subm."),
)
ABOUT = (
    "Every policy at every load, simulated on recorded prompts; upper right is better. Values were chosen on dev prompts. The "
    "gain over the best fixed K has a 95 % interval over seeds. Milliseconds: per token of a request after its first round, and "
    "from its arrival to the end of its first round. Dashed: policies that change the output."
)


def html_of(tables: Sequence[LoadTable], conclusions: Sequence[str], context: Mapping[str, Any]) -> str:
    """Return the page as text; `context` is that of load.json."""
    loads = {table.load: [_point(row) for row in table.rows] for table in tables}
    front = front_section("front", "Throughput against speed per user", ABOUT, loads, [_table(table) for table in tables])
    return rendered(
        {"front": front_figures(loads)},
        title=f"Load: {context['title']}",
        doubts=[],
        overview=[(name, str(value)) for name, value in (context.get("costs") or {}).items()],
        findings_title="Up to which load speculation pays",
        findings=conclusions,
        notes=[],
        data_sets=[],
        sections=[front, *context_section(context)],
    )


def _point(row: PolicyRow) -> FrontPoint:
    user, total = (row.numbers[name].value for name in ("user_tokens_per_second", "tokens_per_second"))
    return FrontPoint(row.family, user, total, row.lossless)


def _table(table: LoadTable) -> Table:
    caption = table.load if table.alone is None else f"{table.load}; the target alone makes {table.alone:,.0f} tokens per second"
    return Table(caption, COLUMNS, [Row(_cells(row)) for row in table.rows], sorted_by=-1)


def _cells(row: PolicyRow) -> list[Cell]:
    numbers = row.numbers
    value = " ".join(f"{number:g}" for number in row.value)
    return [
        Cell(row.family, row.family, lossy=not row.lossless),
        Cell(value or None, value or None),
        number_cell(numbers["tokens_per_second"].value, 0),
        change_cell(row.over_fixed),
        number_cell(numbers["user_tokens_per_second"].value, 1),
        levels_cell(_levels(numbers, "token_ms")),
        levels_cell(_levels(numbers, "first_token_ms")),
        *(number_cell(numbers[name].value, 2) for name in ("block_efficiency", "discard_rate", "draft_steps", "submitted")),
    ]


def _levels(numbers: Mapping[str, Interval], name: str) -> dict[str, float]:
    return {key.removeprefix(f"{name}_"): number.value for key, number in numbers.items() if key.startswith(f"{name}_p")}
