"""The tables of a report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from specheads.evaluation import conclusions
from specheads.evaluation.answer import winners_at
from specheads.evaluation.candidates import FIXED
from specheads.evaluation.conclusions import FormattedInterval, change, minus, percent, times
from specheads.evaluation.keys import Kind
from specheads.evaluation.report import (
    BatchRow,
    BatchTable,
    ComparedSetting,
    Comparison,
    DataSet,
    LiveRow,
    Report,
    Winner,
)
from specheads.replay.intervals import LEVELS, Interval
from specheads.table import Cell, Table

Row = TypeVar("Row")


def table_of(
    caption: str,
    columns: Mapping[str, Callable[[Row], Cell]],
    rows: Sequence[Row],
    doubtful: bool = False,
    sorts: bool = False,
) -> Table:
    """Return a table of records, by column what makes the cell of a record."""
    caption = caption.replace(" %", "\u00a0%") + (", unreliable" if doubtful else "")
    cells = []
    for row in rows:
        cells.append([cell(row) for cell in columns.values()])
    return Table(caption, tuple(columns), cells, sorts, doubtful)


FAR_OFF = 0.5  # errors of predicted speeds whose size means nothing
NO_GAIN = Cell("no gain", -1.0)  # of shares below 0, whose size means nothing


def estimate_cell(show: Callable[[Interval], FormattedInterval], estimate: Interval | None) -> Cell:
    """Return an estimate with its interval, as `show` writes it."""
    return (
        Cell(None)
        if estimate is None
        else Cell(show(estimate).text, estimate.value, show(estimate).limits)
    )


def _named(text: str, tag: str | None = None) -> Cell:
    return Cell(text, text, tag=tag)


def _setting(row: LiveRow | BatchRow, marked: str | None, tag: str) -> Cell:
    """Return the name of a setting that was decoded, with `tag` if it is the one to mark."""
    if row.name == marked:
        return _named(row.name, tag)
    return _named(row.name, None if row.lossless else "lossy")


def _number(value: float | None, digits: int) -> Cell:
    return Cell(None) if value is None else Cell(minus(f"{value:,.{digits}f}"), value)


def _cost(share: float | None) -> Cell:
    """Return a head's cost as a share of a draft step; more than a step is no share."""
    return Cell(
        None if share is None else "over a step" if share > 1 else f"{share * 100:.3g}\u00a0%",
        share,
    )


def _share(share: Interval | None) -> Cell:
    return NO_GAIN if share is not None and share.value <= 0 else estimate_cell(percent, share)


def _levels(milliseconds: Mapping[str, float]) -> Cell:
    """Return the percentiles of a time, sorted by the first."""
    levels = [milliseconds[f"p{level}"] for level in LEVELS]
    return Cell(" / ".join(f"{level:.1f}" for level in levels), levels[0])


def _spread(digits: int) -> Callable[[Interval], FormattedInterval]:
    """Return what shows an estimate with half the width of its interval."""
    return lambda each: FormattedInterval(
        f"{each.value:.{digits}f}", f"±{(each.high - each.low) / 2:.{digits}f}"
    )


def _speed(each: Interval) -> FormattedInterval:
    return FormattedInterval(f"{each.value:,.1f}", f"[{each.low:,.1f}, {each.high:,.1f}]")


class _Row(NamedTuple):
    """A row of the table of what there is to choose from."""

    kind: Kind
    choice: ComparedSetting


def answer_table(report: Report, comparison: Comparison) -> Table:
    """Return what there is to choose from at one ratio; the setting to use is marked."""
    rows = [_Row(kind, choice) for kind, choice in comparison.choices.items()]

    def title(row: _Row) -> Cell:
        return _named(row.kind.value, "use" if row.kind == comparison.use else None)

    def speedup(row: _Row) -> Cell:
        if row.kind == Kind.ALONE:
            return Cell("1.00×", 1.0)
        return estimate_cell(times, row.choice.speedup)

    def gain(row: _Row) -> Cell:
        compared = row.kind not in (Kind.ALONE, Kind.FIXED)
        return estimate_cell(change, row.choice.gain if compared else None)

    columns = {
        "": title,
        "speed-up": speedup,
        "over best fixed": gain,
        "setting": lambda row: _named(row.choice.name),
    }
    ratio = conclusions.ratio_text(report, comparison.ratio)
    return table_of(f"At cost ratio {ratio}", columns, rows)


def winners_table(report: Report, data_set: DataSet, ratio: str) -> Table:
    """Return the best rule of each family on a data set at a ratio; the one to use is marked."""
    used = conclusions.used_at(report, ratio)

    def tag(row: Winner) -> str | None:
        return (
            "bound"
            if row.bound
            else "use"
            if row.name == used
            else "baseline"
            if row.family == FIXED
            else None
        )

    def gain(row: Winner, estimate: Interval | None) -> Cell:
        return estimate_cell(change, None if row.family == FIXED else estimate)

    columns: dict[str, Callable[[Winner], Cell]] = {
        "family": lambda row: _named(row.family, tag(row)),
        "rule": lambda row: _named(row.name),
        "speed-up": lambda row: estimate_cell(times, row.speedup),
        "over best fixed": lambda row: gain(row, row.gain),
        "of gap to ceiling": lambda row: _share(None if row.family == FIXED else row.gap_ceiling),
        "excluding head overhead": lambda row: gain(row, row.gain_uncharged),
        "head’s cost": lambda row: _cost(row.head_share),
    }
    caption = (
        f"{data_set.name}, cost ratio {conclusions.ratio_text(report, ratio)}: the best of each"
        f" family; {conclusions.counted_text(report, ratio)}"
    )
    return table_of(caption, columns, winners_at(data_set, ratio))


def live_table(report: Report) -> Table:
    """Return measured speeds next to those that the costs predict.

    The setting to use is marked.
    """
    chosen = None if report.answer is None else report.answer.setting

    def predicted(row: LiveRow, value: float | None) -> Cell:
        error = 0.0 if value is None else value / row.tokens_per_second.value - 1
        text = (
            minus(f"({error:+.1%})").replace("%", "\u00a0%") if abs(error) < FAR_OFF else "far off"
        )
        return replace(_number(value, 1), limits=None if value is None else text)

    columns: dict[str, Callable[[LiveRow], Cell]] = {
        "setting": lambda row: _setting(row, chosen, "use"),
        "tok/s": lambda row: estimate_cell(_speed, row.tokens_per_second),
        "speed-up": lambda row: estimate_cell(times, row.speedup),
        "over best fixed": lambda row: estimate_cell(change, row.gain),
        "by replay": lambda row: predicted(row, row.replayed_tokens_per_second),
        "discard": lambda row: estimate_cell(_spread(3), row.discard_rate),
        "verif.": lambda row: estimate_cell(_spread(3), row.verification_rate),
        "block eff.": lambda row: _number(row.block_efficiency, 2),
        "accepted": lambda row: _number(row.acceptance_rate, 2),
        "ms p50 / p90 / p99": lambda row: _levels(row.milliseconds),
    }
    caption = "Measured speed, and tokens per second as replay predicts them"
    return table_of(caption, columns, report.live, sorts=True, doubtful=report.is_unreliable)


def batch_table(report: Report, batches: BatchTable) -> Table:
    """Return what batches of one size decoded.

    The fastest setting that keeps the target's distribution is marked.
    """
    fastest = None if report.is_unreliable else conclusions.fastest_of(batches).name
    columns: dict[str, Callable[[BatchRow], Cell]] = {
        "setting": lambda row: _setting(row, fastest, "fastest"),
        "tok/s in all": lambda row: _number(row.tokens_per_second, 1),
        "over target": lambda row: Cell(f"{row.over_alone:.2f}×", row.over_alone),
        "tok/s of a request": lambda row: _number(row.request_tokens_per_second, 1),
        "speed-up": lambda row: estimate_cell(times, row.speedup),
        "ms p50 / p90 / p99": lambda row: _levels(row.token_ms),
        "first ms p50 / p90 / p99": lambda row: _levels(row.first_token_ms),
        "tok/round": lambda row: _number(row.tokens_per_round, 2),
    }
    caption = f"{batches.concurrency} at once: {batches.num_requests} requests"
    return table_of(caption, columns, batches.rows, sorts=True, doubtful=report.is_unreliable)
