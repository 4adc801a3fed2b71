"""The tables of a report, each made once for every reader: the page's templates, the console (`terminal`) and W&B."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

from specheads.evaluation.candidates import CEILING, FIXED, ORACLE
from specheads.evaluation.conclusions import (
    Shown,
    change,
    counted_text,
    minus,
    percent,
    ratio_text,
    share_text,
    times,
    winners_at,
)
from specheads.evaluation.intervals import LEVELS, Interval
from specheads.evaluation.report import BatchRow, BatchTable, DataSet, LiveRow, QualityRow, Report, Winner
from specheads.evaluation.sweep import TARGET_ALONE

SCORE_TITLES = {"exact_number": "right numbers", "rouge_l": "ROUGE-L"}
QUALITY_TITLE = "Quality of responses"
ABOUT_QUALITY = (
    "Perplexity: of all emitted tokens under the target as it is, without temperature, top-k and top-p. Win rate: the share "
    "of prompts on which the response is more likely under the target, per token, than the response of the target alone; "
    "ties count half. It is about 0.5 where the target's distribution is kept. Rejections: rounds in which a drafted "
    "token was rejected, per emitted token."
)


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


def _titled(caption: str, columns: Sequence[str], rows: Sequence[Row], sorted_by: int | None = None) -> Table:
    """Return a table in whose caption percent signs stay next to their numbers."""
    return Table(caption.replace(" %", "\u00a0%"), columns, rows, sorted_by)


def named(text: str, tag: str | None = None, lossy: bool = False, breaks: bool = False) -> Cell:
    """Return a text that is sorted by itself."""
    return Cell(text, text, tag=tag, lossy=lossy, breaks=breaks)


def estimate_cell(show: Callable[[Interval], Shown], estimate: Interval | None) -> Cell:
    """Return an estimate with its interval, as `show` writes it."""
    return Cell(None) if estimate is None else Cell(show(estimate).text, estimate.value, show(estimate).limits)


def _number(value: float | None, digits: int) -> Cell:
    return Cell(None) if value is None else Cell(minus(f"{value:,.{digits}f}"), value)


def _cost(share: float | None) -> Cell:
    return Cell(None) if share is None else Cell(share_text(share).replace(" ", "\u00a0"), share)


def _levels(milliseconds: Mapping[str, float]) -> Cell:
    """Return the percentiles of a time, sorted by the first."""
    levels = [milliseconds[f"p{level}"] for level in LEVELS]
    return Cell(" / ".join(f"{level:.1f}" for level in levels), levels[0])


def _spread(digits: int) -> Callable[[Interval], Shown]:
    """Return what shows an estimate with half the width of its interval."""
    return lambda each: Shown(f"{each.value:.{digits}f}", f"±{(each.high - each.low) / 2:.{digits}f}")


def _speed(each: Interval) -> Shown:
    return Shown(f"{each.value:,.1f}", f"[{each.low:,.1f}, {each.high:,.1f}]")


def winners_table(report: Report, data_set: DataSet, ratio: str) -> Table:
    """Return the best rule of each family on a data set at a ratio."""
    winners = winners_at(data_set, ratio)
    top = next((row for row in winners if not row.bound), None)
    gaps = ("over best fixed", "of gap to ceiling", "of gap to oracle")
    columns = ("family", "rule", "speed-up", *gaps, "head’s cost", "break-even")
    caption = f"{data_set.name}, ratio {ratio_text(report, ratio)}: the best of each family; {counted_text(report, ratio)}"
    return _titled(caption, columns, [_winner(row, row is top) for row in winners])


def _winner(row: Winner, best: bool) -> Row:
    note = "best" if best else {FIXED: "baseline", CEILING: "bound", ORACLE: "bound"}.get(row.family)
    gaps = [estimate_cell(percent, gap) for gap in (row.gap_ceiling, row.gap_oracle)]
    gains = [Cell(None)] * 3 if row.family == FIXED else [estimate_cell(change, row.gain), *gaps]
    cells = [named(row.family, note, breaks=True), named(row.name), estimate_cell(times, row.speedup), *gains]
    cells += [_cost(row.head_share), estimate_cell(percent, row.break_even)]
    return Row(cells, "best" if best else "bound" if row.bound else "")


def across_table(report: Report, ratio: str) -> Table:
    """Return the gain of each family over the best fixed length on every data set at a ratio."""
    gains: dict[str, dict[int, Interval]] = {}
    bounds = {row.family for data_set in report.data_sets for row in data_set.winners if row.bound}
    for number, data_set in enumerate(report.data_sets):
        for row in winners_at(data_set, ratio):
            if row.family != FIXED:
                gains.setdefault(row.family, {})[number] = row.gain
    rows = []
    for family, by_set in gains.items():
        cells = [estimate_cell(change, by_set.get(number)) for number in range(len(report.data_sets))]
        rows.append(Row([named(family, breaks=True), *cells], "bound" if family in bounds else ""))
    caption = f"Gain over the best fixed length on every data set, ratio {ratio_text(report, ratio)}; "
    names = [f"{data_set.name} ({data_set.role})" for data_set in report.data_sets]
    return _titled(caption + counted_text(report, ratio), ("family", *names), rows)


def live_table(report: Report) -> Table:
    """Return measured speeds next to those that the costs predict."""
    gains = ["block eff. gain"] if any(row.efficiency_gain for row in report.live) else []
    columns = ["setting", "tok/s", "speed-up", "by costs", "by replay", "discard", "verif.", "block eff.", "accepted"]
    fastest = max((row for row in report.live if row.lossless), key=lambda row: row.speedup.value, default=None)
    rows = []
    for row in report.live:
        cells = _live(row, row is fastest) + [estimate_cell(change, row.efficiency_gain)] * len(gains)
        rows.append(Row(cells, "best" if row is fastest else ""))
    caption = "Measured speed, and tokens per second as the fitted costs predict them"
    caption += "; not to be trusted" if report.doubts else ""
    return _titled(caption, [*columns, "ms p50 / p90 / p99", *gains], rows, sorted_by=-1)


def _live(row: LiveRow, fastest: bool) -> list[Cell]:
    accepted, measured = _number(row.acceptance_rate, 2), row.tokens_per_second
    if row.accepted_over_expected is not None:
        accepted = replace(accepted, limits=f"{row.accepted_over_expected.value:.0%} of expected")
    return [
        named(row.name, "fastest" if fastest else None, not row.lossless),
        estimate_cell(_speed, measured),
        estimate_cell(times, row.speedup),
        _predicted(row.predicted_tokens_per_second, measured.value),
        _predicted(row.replayed_tokens_per_second, measured.value),
        estimate_cell(_spread(3), row.discard_rate),
        estimate_cell(_spread(3), row.verification_rate),
        _number(row.block_efficiency, 2),
        accepted,
        _levels(row.milliseconds),
    ]


def _predicted(value: float | None, measured: float) -> Cell:
    if value is None:
        return Cell(None)
    return Cell(f"{value:,.1f}", value, minus(f"({value / measured - 1:+.1%})").replace("%", "\u00a0%"))


def batch_table(report: Report, batches: BatchTable) -> Table:
    """Return what batches of one size decoded; the setting with the highest throughput is marked."""
    speeds = ("tok/s in all", "over target", "tok/s of a request", "speed-up")
    columns = ("setting", *speeds, "ms p50 / p90 / p99", "first ms p50 / p90 / p99", "tok/round")
    caption = f"{batches.concurrency} at once: {batches.num_requests} requests"
    caption += "; not to be trusted" if report.doubts else ""
    fastest = max((row for row in batches.rows if row.lossless), key=lambda row: row.tokens_per_second)
    rows = [Row(_batch(row, row is fastest), "best" if row is fastest else "") for row in batches.rows]
    return _titled(caption, columns, rows, sorted_by=-1)


def _batch(row: BatchRow, fastest: bool) -> list[Cell]:
    return [
        named(row.name, "fastest" if fastest else None, not row.lossless),
        _number(row.tokens_per_second, 1),
        Cell(f"{row.over_alone:.2f}×", row.over_alone),
        _number(row.request_tokens_per_second, 1),
        estimate_cell(times, row.speedup),
        _levels(row.token_ms),
        _levels(row.first_token_ms),
        _number(row.tokens_per_round, 2),
    ]


def loads_table(report: Report, loads: Mapping[str, Mapping[str, BatchRow]]) -> Table:
    """Return the tokens per second of all loads in all, and in brackets those of a request."""
    rows = []
    for name in dict.fromkeys(name for of_load in loads.values() for name in of_load):
        shown = [of_load.get(name) for of_load in loads.values()]
        speeds = [(row.tokens_per_second, row.request_tokens_per_second) if row else None for row in shown]
        rows.append(
            Row(
                [named(name), *(Cell(f"{each[0]:,.0f}", each[0], f"({each[1]:,.1f})") if each else Cell(None) for each in speeds)]
            )
        )
    caption = "Tokens per second of all requests together, and in brackets of one"
    return Table(caption + ("; not to be trusted" if report.doubts else ""), ("", *loads), rows)


def bank_table(report: Report, ratio: str) -> Table:
    """Return the heads of the bank at a ratio, the fastest first."""
    heads = sorted((row for row in report.bank if ratio in row.speedup), key=lambda row: -row.speedup[ratio].value)
    rows: list[Row] = []
    for row in heads:
        costs = [_cost(row.head_share.get(ratio)), estimate_cell(percent, row.break_even.get(ratio))]
        numbers = [_number(row.threshold.get(ratio), 2), _number(row.auroc, 4), _number(row.ece, 4)]
        cells = [named(row.head), estimate_cell(times, row.speedup[ratio]), *costs, *numbers]
        rows.append(Row(cells, "" if rows else "best"))
    columns = ("head", "speed-up", "head’s cost", "break-even", "threshold", "AUROC", "ECE")
    return _titled(f"Heads, ratio {ratio_text(report, ratio)}; {counted_text(report, ratio)}", columns, rows, sorted_by=1)


def divergence_table(report: Report) -> Table:
    """Return the KL divergence of every head of the bank on the prompts of its training, and on all that are reported."""
    splits = [split for split in ("train", "dev") if any(split in row.trained_kl for row in report.bank)]
    sets = list(dict.fromkeys(name for row in report.bank for name in row.kl))
    rows = []
    for row in report.bank:
        values = [*(row.trained_kl.get(split) for split in splits), *(row.kl.get(name) for name in sets)]
        rows.append(Row([named(row.head), *(_number(value, 4) for value in values)]))
    columns = ("head", *(f"{split}, in training" for split in splits), *sets)
    return _titled("KL divergence of the predictions, nats", columns, rows)


def drafts_table(report: Report, ratio: str) -> Table:
    """Return the speed-up of each draft with each kind of rule at a ratio; the fastest is marked."""
    drafts = [row for row in report.drafts if ratio in row.speedup]
    top = max(drafts, key=lambda row: row.speedup[ratio].value, default=None)
    decoded = "doubtful" if report.doubts else ""
    rows = []
    for row in drafts:
        names = [named(row.draft), named(row.kind), named(row.rules[ratio])]
        speeds = [estimate_cell(times, row.speedup[ratio]), _number(row.block_efficiency[ratio], 2)]
        measured = replace(estimate_cell(_speed, row.tokens_per_second), kind=decoded)
        rows.append(Row([*names, *speeds, measured], "best" if row is top else ""))
    columns = ("draft", "with", "rule", "speed-up", "block eff.", f"tok/s, decoded{', doubtful' if decoded else ''}")
    caption = f"Drafts and what stops them, ratio {ratio_text(report, ratio)}; {counted_text(report, ratio)}"
    return _titled(caption, columns, rows)


def quality_table(report: Report) -> Table | None:
    """Return the estimates on the quality of responses; None where it was not measured."""
    measured = [row.quality for row in report.live if row.quality]
    if not measured:
        return None
    columns: dict[str, Callable[[QualityRow], Interval | None]] = {
        "perplexity": lambda quality: quality.perplexity,
        "win rate": lambda quality: quality.win_rates.get(TARGET_ALONE.name),
        "rejections per token": lambda quality: quality.rejections_per_token,
    }
    if any(quality.score for quality in measured):
        name = report.context["score"]
        columns[SCORE_TITLES.get(name, name)] = lambda quality: quality.score
    rows = []
    for row in report.live:
        values = {name: value(row.quality) if row.quality else None for name, value in columns.items()}
        cells = [estimate_cell(_spread(2 if name == "perplexity" else 3), value) for name, value in values.items()]
        rows.append(Row([named(row.name, lossy=not row.lossless), *cells]))
    return Table("How likely responses are under the target", ["setting", *columns], rows, sorted_by=-1)


def comparisons(report: Report) -> list[str]:
    """Return how lossy settings with the same stopping rule compare, as sentences."""
    return [
        f"{row.name} over {name}: win rate {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}]"
        for row in report.live
        if row.quality
        for name, rate in row.quality.win_rates.items()
        if name != TARGET_ALONE.name
    ]


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
        title = caption and escape(caption)
        part = RichTable(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, row_styles=[style])
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
