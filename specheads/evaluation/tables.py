"""The tables of a report, for the page, the console and the logs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

from specheads.evaluation.candidates import CEILING, FIXED, ORACLE
from specheads.evaluation.conclusions import (
    change,
    change_limits,
    counted_text,
    minus,
    percent,
    percent_limits,
    ratio_text,
    share_text,
    times,
    times_limits,
    winners_at,
)
from specheads.evaluation.intervals import LEVELS, Interval
from specheads.evaluation.report import (
    BatchRow,
    BatchTable,
    DataSet,
    LiveRow,
    QualityRow,
    Report,
    Winner,
)
from specheads.evaluation.sweep import TARGET_ALONE


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


SCORE_TITLES = {"exact_number": "right numbers", "rouge_l": "ROUGE-L"}
QUALITY_TITLE = "Quality of responses"
ABOUT_QUALITY = (
    "Perplexity: of all emitted tokens under the target as it is, without temperature, top-k and top-p. Win rate: the share "
    "of prompts on which the response is more likely under the target, per token, than the response of the target alone; "
    "ties count half. It is about 0.5 where the target's distribution is kept. Rejections: rounds in which a drafted "
    "token was rejected, per emitted token."
)


def winners_table(report: Report, data_set: DataSet, ratio: str) -> Table:
    """Return the best rule of each family on a data set at a ratio."""
    winners = winners_at(data_set, ratio)
    top = next((row for row in winners if not row.bound), None)
    columns = (
        "family",
        "rule",
        "speed-up",
        "over best fixed",
        "of gap to ceiling",
        "of gap to oracle",
        "head’s cost",
        "break-even",
    )
    caption = f"{data_set.name}, ratio {ratio_text(report, ratio)}: the best of each family; {counted_text(report, ratio)}"
    return Table(unbroken(caption), columns, [_winner(row, row is top) for row in winners])


def _winner(row: Winner, best: bool) -> Row:
    note = "best" if best else {FIXED: "baseline", CEILING: "bound", ORACLE: "bound"}.get(row.family)
    cells = [Cell(row.family, row.family, tag=note, breaks=True), Cell(row.name, row.name), times_cell(row.speedup)]
    gains = [change_cell(row.gain), share_cell(row.gap_ceiling), share_cell(row.gap_oracle)]
    cells += [Cell(None)] * 3 if row.family == FIXED else gains
    cells += [cost_cell(row.head_share), share_cell(row.break_even)]
    return Row(cells, "best" if best else "bound" if row.bound else "")


def across_table(report: Report, ratio: str) -> Table:
    """Return the gain of each family over the best fixed length on every data set at a ratio."""
    gains: dict[str, dict[int, Interval]] = {}
    bounds = {row.family for data_set in report.data_sets for row in data_set.winners if row.bound}
    for number, data_set in enumerate(report.data_sets):
        for row in winners_at(data_set, ratio):
            if row.family != FIXED:
                gains.setdefault(row.family, {})[number] = row.gain
    numbers = range(len(report.data_sets))
    rows = [
        Row(
            [Cell(family, family, breaks=True), *(change_cell(by_set.get(number)) for number in numbers)],
            "bound" if family in bounds else "",
        )
        for family, by_set in gains.items()
    ]
    caption = (
        f"Gain over the best fixed length on every data set, ratio {ratio_text(report, ratio)}; {counted_text(report, ratio)}"
    )
    return Table(unbroken(caption), ("family", *(f"{data_set.name} ({data_set.role})" for data_set in report.data_sets)), rows)


def live_table(report: Report) -> Table:
    """Return measured speeds next to those that the costs predict."""
    columns = [
        "setting",
        "tok/s",
        "speed-up",
        "by costs",
        "by replay",
        "discard",
        "verif.",
        "block eff.",
        "accepted",
        "ms p50 / p90 / p99",
    ]
    gains = any(row.efficiency_gain for row in report.live)
    columns += ["block eff. gain"] if gains else []
    fastest = max((row for row in report.live if row.lossless), key=lambda row: row.speedup.value, default=None)
    rows = [[*_live(row, row is fastest), *([change_cell(row.efficiency_gain)] if gains else [])] for row in report.live]
    kinds = ["best" if row is fastest else "" for row in report.live]
    caption = "Measured speed, and tokens per second as the fitted costs predict them"
    caption += "; not to be trusted" if report.doubts else ""
    return Table(unbroken(caption), columns, [Row(cells, kind) for cells, kind in zip(rows, kinds, strict=True)], sorted_by=-1)


def _live(row: LiveRow, fastest: bool) -> list[Cell]:
    speed = row.tokens_per_second
    return [
        Cell(row.name, row.name, tag="fastest" if fastest else None, lossy=not row.lossless),
        speed_cell(speed),
        times_cell(row.speedup),
        _predicted(row.predicted_tokens_per_second, speed.value),
        _predicted(row.replayed_tokens_per_second, speed.value),
        spread_cell(row.discard_rate),
        spread_cell(row.verification_rate),
        number_cell(row.block_efficiency, 2),
        _accepted(row),
        levels_cell(row.milliseconds),
    ]


def _accepted(row: LiveRow) -> Cell:
    cell = number_cell(row.acceptance_rate, 2)
    if row.accepted_over_expected is None:
        return cell
    return replace(cell, limits=f"{row.accepted_over_expected.value:.0%} of expected")


def batch_table(report: Report, batches: BatchTable) -> Table:
    """Return what batches of one size decoded; the setting with the highest throughput is marked."""
    columns = (
        *("setting", "tok/s in all", "over target", "tok/s of a request", "speed-up", "ms p50 / p90 / p99"),
        *("first ms p50 / p90 / p99", "tok/round"),
    )
    caption = f"{batches.concurrency} at once: {batches.num_requests} requests"
    caption += "; not to be trusted" if report.doubts else ""
    fastest = max((row for row in batches.rows if row.lossless), key=lambda row: row.tokens_per_second)
    rows = [Row(_batch(row, row is fastest), "best" if row is fastest else "") for row in batches.rows]
    return Table(unbroken(caption), columns, rows, sorted_by=-1)


def _batch(row: BatchRow, fastest: bool) -> list[Cell]:
    return [
        Cell(row.name, row.name, tag="fastest" if fastest else None, lossy=not row.lossless),
        number_cell(row.tokens_per_second, 1),
        Cell(f"{row.over_alone:.2f}×", row.over_alone),
        number_cell(row.request_tokens_per_second, 1),
        times_cell(row.speedup),
        levels_cell(row.token_ms),
        levels_cell(row.first_token_ms),
        number_cell(row.tokens_per_round, 2),
    ]


def _predicted(value: float | None, measured: float) -> Cell:
    if value is None:
        return Cell(None)
    return Cell(f"{value:,.1f}", value, minus(f"({value / measured - 1:+.1%})").replace("%", "\u00a0%"))


def bank_table(report: Report, ratio: str) -> Table:
    """Return the heads of the bank at a ratio, the fastest first."""
    heads = sorted((row for row in report.bank if ratio in row.speedup), key=lambda row: -row.speedup[ratio].value)
    rows = [
        Row(
            [
                Cell(row.head, row.head),
                times_cell(row.speedup[ratio]),
                cost_cell(row.head_share.get(ratio)),
                share_cell(row.break_even.get(ratio)),
                number_cell(row.threshold.get(ratio), 2),
                number_cell(row.auroc, 4),
                number_cell(row.ece, 4),
            ],
            "best" if number == 0 else "",
        )
        for number, row in enumerate(heads)
    ]
    columns = ("head", "speed-up", "head’s cost", "break-even", "threshold", "AUROC", "ECE")
    return Table(unbroken(f"Heads, ratio {ratio_text(report, ratio)}; {counted_text(report, ratio)}"), columns, rows, sorted_by=1)


def divergence_table(report: Report) -> Table:
    """Return the KL divergence of every head of the bank on the prompts of its training, and on all that are reported."""
    splits = [split for split in ("train", "dev") if any(split in row.trained_kl for row in report.bank)]
    sets = list(dict.fromkeys(name for row in report.bank for name in row.kl))
    rows = [
        Row(
            [
                Cell(row.head, row.head),
                *(number_cell(row.trained_kl.get(split), 4) for split in splits),
                *(number_cell(row.kl.get(name), 4) for name in sets),
            ]
        )
        for row in report.bank
    ]
    columns = ("head", *(f"{split}, in training" for split in splits), *sets)
    return Table(unbroken("KL divergence of the predictions, nats"), columns, rows)


def drafts_table(report: Report, ratio: str) -> Table:
    """Return the speed-up of each draft with each kind of rule at a ratio; the fastest is marked."""
    rows = [row for row in report.drafts if ratio in row.speedup]
    top = max(rows, key=lambda row: row.speedup[ratio].value, default=None)
    decoded = "doubtful" if report.doubts else ""
    cells = [
        Row(
            [
                Cell(row.draft, row.draft),
                Cell(row.kind, row.kind),
                Cell(row.rules[ratio], row.rules[ratio]),
                times_cell(row.speedup[ratio]),
                number_cell(row.block_efficiency[ratio], 2),
                replace(speed_cell(row.tokens_per_second), kind=decoded),
            ],
            "best" if row is top else "",
        )
        for row in rows
    ]
    columns = ("draft", "with", "rule", "speed-up", "block eff.", f"tok/s, decoded{', doubtful' if decoded else ''}")
    caption = f"Drafts and what stops them, ratio {ratio_text(report, ratio)}; {counted_text(report, ratio)}"
    return Table(unbroken(caption), columns, cells)


class _Column(NamedTuple):
    """A column of estimates with intervals."""

    name: str
    value: Callable[[LiveRow], Interval | None]
    digits: int = 3


def _quality_columns(report: Report) -> list[_Column]:
    """Return the columns on the quality of responses, none where it was not measured."""
    rows = [row.quality for row in report.live if row.quality]
    if not rows:
        return []
    columns = [
        _quality("perplexity", lambda quality: quality.perplexity, 2),
        _quality("win rate", lambda quality: quality.win_rates.get(TARGET_ALONE.name)),
        _quality("rejections per token", lambda quality: quality.rejections_per_token),
    ]
    if any(row.score for row in rows):
        name = report.context["score"]
        columns.append(_quality(SCORE_TITLES.get(name, name), lambda quality: quality.score))
    return columns


def comparisons(report: Report) -> list[str]:
    """Return how lossy settings with the same stopping rule compare, as sentences."""
    return [
        f"{row.name} over {name}: win rate {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}]"
        for row in report.live
        if row.quality
        for name, rate in row.quality.win_rates.items()
        if name != TARGET_ALONE.name
    ]


def _quality(name: str, value: Callable[[QualityRow], Interval | None], digits: int = 3) -> _Column:
    return _Column(name, lambda row: value(row.quality) if row.quality else None, digits)


def quality_table(report: Report) -> Table | None:
    """Return the estimates on the quality of responses; None where it was not measured."""
    columns = _quality_columns(report)
    if not columns:
        return None
    rows = [
        [Cell(row.name, row.name, lossy=not row.lossless), *(spread_cell(column.value(row), column.digits) for column in columns)]
        for row in report.live
    ]
    names = ["setting", *(column.name for column in columns)]
    return Table("How likely responses are under the target", names, [Row(each) for each in rows], sorted_by=-1)
