"""The page's tables as HTML."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from specheads.evaluation.candidate import FIXED
from specheads.evaluation.findings import (
    BOUNDS,
    achievable,
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
from specheads.evaluation.intervals import Interval
from specheads.evaluation.results import DataSet, LiveRow, Report, Winner

NONE = '<span class="none">–</span>'


@dataclass(frozen=True)
class Cell:
    """Content of a table as HTML, and what to sort it by."""

    html: str
    key: float | str | None = None
    kind: str = ""  # doubtful


@dataclass(frozen=True)
class Row:
    cells: Sequence[Cell]
    kind: str = ""  # best, bound


def table(caption: str, columns: Sequence[str], rows: Sequence[Row], sorted_by: int | None = None) -> str:
    """Return a table in a box that scrolls by itself; with `sorted_by`, the column it is in order of, a click on a heading sorts it."""
    heads = "".join(_heading(number, column, sorted_by) for number, column in enumerate(columns))
    body = "".join(
        f'<tr class="{row.kind}">{_cell(row.cells[0], "th")}{"".join(_cell(cell, "td") for cell in row.cells[1:])}</tr>'
        for row in rows
    )
    name = escape(caption).replace(" %", "\u00a0%")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}"><table><caption><span>{name}</span></caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _heading(number: int, column: str, sorted_by: int | None) -> str:
    if sorted_by is None:
        return f'<th scope="col">{escape(column)}</th>'
    order = ' aria-sort="descending"' if number == sorted_by else ""
    return f'<th scope="col"{order}><button type="button">{escape(column)}</button></th>'


def _cell(cell: Cell, tag: str) -> str:
    key = "" if cell.key is None else f' data-key="{escape(str(cell.key))}"'
    scope = ' scope="row"' if tag == "th" else ""
    kind = f' class="{cell.kind}"' if cell.kind else ""
    return f"<{tag}{scope}{kind}{key}>{cell.html}</{tag}>"


def text_cell(text: str) -> Cell:
    return Cell(escape(text), text)


def family_cell(family: str, note: str | None = None) -> Cell:
    """Return a family's name, which may break after an underscore."""
    name = escape(family).replace("_", "_<wbr>")
    return Cell(f'{name} <span class="tag">{note}</span>' if note else name, family)


def number_cell(value: float | None, digits: int) -> Cell:
    return Cell(NONE) if value is None else Cell(minus(f"{value:,.{digits}f}"), value)


def interval_cell(value: str, limits: str, key: float) -> Cell:
    return Cell(f"<b>{value}</b> <small>{limits}</small>", key)


def times_cell(found: Interval | None) -> Cell:
    return Cell(NONE) if found is None else interval_cell(times(found), times_limits(found), found.value)


def change_cell(found: Interval | None) -> Cell:
    return Cell(NONE) if found is None else interval_cell(change(found), change_limits(found), found.value)


def cost_cell(share: float | None) -> Cell:
    return Cell(NONE) if share is None else Cell(share_text(share).replace(" ", "\u00a0"), share)


def share_cell(found: Interval | None) -> Cell:
    return Cell(NONE) if found is None else interval_cell(percent(found), percent_limits(found), found.value)


def winners_table(report: Report, data_set: DataSet, ratio: str) -> str:
    """Return what the best of each family does on a data set at a ratio."""
    winners = winners_at(data_set, ratio)
    top = next((row for row in winners if achievable(row.family)), None)
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
    return table(caption, columns, [_winner(row, row is top) for row in winners])


def _winner(row: Winner, best: bool) -> Row:
    note = "best" if best else {FIXED: "baseline", **dict.fromkeys(BOUNDS, "bound")}.get(row.family)
    cells = [family_cell(row.family, note), text_cell(row.name), times_cell(row.speedup)]
    gains = [change_cell(row.gain), share_cell(row.gap_ceiling), share_cell(row.gap_oracle)]
    cells += [Cell(NONE)] * 3 if row.family == FIXED else gains
    cells += [cost_cell(row.head_share), share_cell(row.break_even)]
    return Row(cells, "best" if best else "" if achievable(row.family) else "bound")


def across_table(report: Report, ratio: str) -> str:
    """Return what each family gains over the best fixed length on every data set at a ratio."""
    gains: dict[str, dict[int, Interval]] = {}
    for number, data_set in enumerate(report.data_sets):
        for row in winners_at(data_set, ratio):
            if row.family != FIXED:
                gains.setdefault(row.family, {})[number] = row.gain
    numbers = range(len(report.data_sets))
    rows = [
        Row([family_cell(family), *(change_cell(found.get(number)) for number in numbers)], "" if achievable(family) else "bound")
        for family, found in gains.items()
    ]
    caption = (
        f"Gain over the best fixed length on every data set, ratio {ratio_text(report, ratio)}; {counted_text(report, ratio)}"
    )
    return table(caption, ("family", *(f"{one.name} ({one.role})" for one in report.data_sets)), rows)


def live_table(report: Report) -> str:
    """Return what was measured, next to what the costs predict."""
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
    columns += ["block eff. gain"] if any(row.efficiency_gain for row in report.live) else []
    fastest = max((row for row in report.live if row.lossless), key=lambda row: row.speedup.value, default=None)
    rows = [_live(row, row is fastest)[: len(columns)] for row in report.live]
    kinds = ["best" if row is fastest else "" for row in report.live]
    caption = "Measured speed, and tokens per second as the fitted costs predict them"
    caption += "; not to be trusted" if report.doubts else ""
    return table(caption, columns, [Row(cells, kind) for cells, kind in zip(rows, kinds, strict=True)], sorted_by=-1)


def _live(row: LiveRow, fastest: bool) -> list[Cell]:
    mark = "" if row.lossless else ' <abbr title="what comes out does not follow the target’s distribution">lossy</abbr>'
    tag = ' <span class="tag">fastest</span>' if fastest else ""
    speed = row.tokens_per_second
    return [
        Cell(escape(row.name) + mark + tag, row.name),
        _tokens_per_second(speed),
        times_cell(row.speedup),
        _predicted(row.predicted_tokens_per_second, speed.value),
        _predicted(row.replayed_tokens_per_second, speed.value),
        _rate(row.discard_rate),
        _rate(row.verification_rate),
        number_cell(row.block_efficiency, 2),
        number_cell(row.acceptance_rate, 2),
        Cell(" / ".join(f"{row.milliseconds[name]:.1f}" for name in ("p50", "p90", "p99")), row.milliseconds["p50"]),
        change_cell(row.efficiency_gain),
    ]


def _predicted(value: float | None, measured: float) -> Cell:
    if value is None:
        return Cell(NONE)
    return interval_cell(f"{value:,.1f}", minus(f"({value / measured - 1:+.1%})").replace("%", "\u00a0%"), value)


def _rate(found: Interval) -> Cell:
    return interval_cell(f"{found.value:.3f}", f"±{(found.high - found.low) / 2:.3f}", found.value)


def bank_table(report: Report, ratio: str) -> str:
    """Return the heads of the bank at a ratio, the fastest first."""
    heads = sorted((row for row in report.bank if ratio in row.speedup), key=lambda row: -row.speedup[ratio].value)
    rows = [
        Row(
            [
                text_cell(row.head),
                times_cell(row.speedup[ratio]),
                cost_cell(row.head_share.get(ratio)),
                share_cell(row.break_even.get(ratio)),
                number_cell(row.threshold.get(ratio), 2),
                number_cell(row.auroc, 4),
                number_cell(row.kl, 4),
                number_cell(row.ece, 4),
            ],
            "best" if number == 0 else "",
        )
        for number, row in enumerate(heads)
    ]
    columns = ("head", "speed-up", "head’s cost", "break-even", "threshold", "AUROC", "KL (nats)", "ECE")
    return table(f"Heads, ratio {ratio_text(report, ratio)}; {counted_text(report, ratio)}", columns, rows, sorted_by=1)


def drafts_table(report: Report, ratio: str) -> str:
    """Return what each draft reaches with each kind of rule at a ratio; the fastest is marked."""
    rows = [row for row in report.drafts if ratio in row.speedup]
    top = max(rows, key=lambda row: row.speedup[ratio].value, default=None)
    decoded = "doubtful" if report.doubts else ""
    cells = [
        Row(
            [
                text_cell(row.draft),
                text_cell(row.kind),
                text_cell(row.rules[ratio]),
                times_cell(row.speedup[ratio]),
                number_cell(row.block_efficiency[ratio], 2),
                replace(_tokens_per_second(row.tokens_per_second), kind=decoded),
            ],
            "best" if row is top else "",
        )
        for row in rows
    ]
    columns = ("draft", "with", "rule", "speed-up", "block eff.", f"tok/s, decoded{', doubtful' if decoded else ''}")
    caption = f"Drafts and what stops them, ratio {ratio_text(report, ratio)}; {counted_text(report, ratio)}"
    return table(caption, columns, cells)


def _tokens_per_second(found: Interval | None) -> Cell:
    return (
        Cell(NONE)
        if found is None
        else interval_cell(f"{found.value:,.1f}", f"[{found.low:,.1f}, {found.high:,.1f}]", found.value)
    )
