"""An evaluation as tables on the console, in 80 columns. Measured figures are dimmed where they are not to be trusted."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specheads.evaluation.conclusions import assumed_text, batch_findings, costs_text, fit_text, ratio_name, ratios_of, share_text
from specheads.evaluation.console_quality import quality_parts
from specheads.evaluation.intervals import LEVELS, Interval
from specheads.evaluation.report import MEASURED, BankRow, BatchRow, BatchTable, DataSet, LiveRow, Report, Winner

LIVE = ("tok/s\nspeed-up", "predicted\nreplayed", "discarded\nverified", "block eff.\naccepted", "ms p50\np90/p99")
HEAD_COSTS = "its cost and the cost up to which it gains (break-even), as shares of a draft step"
BATCHES = ("tok/s", "of a request", "ms per token\nms to the first", "tok/round")
NARROW: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}  # a table for 80 columns


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the tables of a report, and its notes."""
    console = console or Console()
    for doubt in report.doubts:
        console.print(f"[bold]{escape(doubt)}[/bold]", highlight=False)
    console.print(f"Costs: {escape(costs_text(report))}", highlight=False)
    for data in report.data_sets:
        _print_winners(report, data, console)
    if report.bank:
        _print_bank(report, console)
    if report.live:
        _print_live(report, console)
        for part in quality_parts(report, NARROW):
            console.print(part, highlight=False)
    for batches in report.batches:
        console.print(batch_table(batches, doubtful=bool(report.doubts)))
    for finding in [] if report.doubts else batch_findings(report):
        console.print(finding, highlight=False, markup=False)
    if report.drafts:
        _print_drafts(report, console)
    for note in report.notes:
        console.print(note, highlight=False, markup=False)


def _by_ratio(report: Report, title: str, columns: Sequence[str], ratios: Sequence[str]) -> Table:
    """Return an empty table of predicted speeds: `columns`, and one column for each ratio. Its title names the counted costs."""
    table = Table(title=escape(f"{title}; at the ratios {assumed_text(report)}"), **NARROW)
    for column in columns:
        table.add_column(column, overflow="fold")
    for ratio in ratios:
        doubtful = ratio == MEASURED and bool(report.doubts)
        name = f"{ratio}{', doubtful' if doubtful else ''}" if ratio == MEASURED else f"at {ratio}"
        table.add_column(name.replace(", ", ",\n"), justify="right", no_wrap=True, style="dim" if doubtful else None)
    return table


def _print_winners(report: Report, data: DataSet, console: Console) -> None:
    ratios = [ratio for ratio in ratios_of(report) if any(winner.ratio == ratio for winner in data.winners)]
    tuned = "the prompts that rules were tuned on" if data.role == "dev" else "rules tuned on dev prompts"
    title = (
        f"{data.name}: {data.num_prompts} prompts replayed, {tuned}; speed-up, share of the gap to the ceiling, and for a head "
        f"{HEAD_COSTS}"
    )
    table = _by_ratio(report, title, ["rule"], ratios)
    cells: dict[str, dict[str, str]] = {}
    for winner in data.winners:
        cells.setdefault(winner.family, {})[winner.ratio] = _winner(winner)
    for family, row in cells.items():
        table.add_row(escape(family.replace("_", " ")), *(row.get(ratio, "-") for ratio in ratios))
    console.print(table)


def _winner(winner: Winner) -> str:
    gap = "" if winner.gap_ceiling is None else f"\n{winner.gap_ceiling.value:.0%}"
    return f"{_speedup(winner.speedup)}{gap}{_head_cost(winner.head_share, winner.break_even)}"


def _speedup(speedup: Interval) -> str:
    return f"{speedup.value:.3f}x \u00b1{(speedup.high - speedup.low) / 2:.3f}"


def _head_cost(share: float | None, break_even: Interval | None) -> str:
    """Return further lines of a cell: the cost of a head and its break-even cost, where they are known."""
    cost = "" if share is None else f"\ncost {share_text(share)}"
    return cost if break_even is None else f"{cost}\nup to {share_text(break_even.value)}"


def _print_bank(report: Report, console: Console) -> None:
    ratios = [ratio for ratio in ratios_of(report) if any(ratio in row.speedup for row in report.bank)]
    title = f"heads compared on test prompts, with thresholds chosen on dev prompts; speed-up, and for a head {HEAD_COSTS}"
    table = _by_ratio(report, title, ["head\nAUROC"], ratios)
    for row in report.bank:
        table.add_row(f"{escape(row.head)}\n{row.auroc:.4f}", *(_bank(row, ratio) for ratio in ratios))
    console.print(table)


def _bank(row: BankRow, ratio: str) -> str:
    if ratio not in row.speedup:
        return "-"
    return _speedup(row.speedup[ratio]) + _head_cost(row.head_share.get(ratio), row.break_even.get(ratio))


def _print_drafts(report: Report, console: Console) -> None:
    ratios = [ratio for ratio in ratios_of(report) if any(ratio in row.speedup for row in report.drafts)]
    title = "drafts and what stops them: speed-up and block efficiency, each at the draft's own cost ratio"
    table = _by_ratio(report, title, ["draft\nwith"], ratios)
    for row in report.drafts:
        cells = [f"{row.speedup[r].value:.3f}x\n{row.block_efficiency[r]:.2f}" if r in row.speedup else "-" for r in ratios]
        table.add_row(f"{escape(row.draft)}\n{row.kind}", *cells)
    console.print(table)


def _print_live(report: Report, console: Console) -> None:
    context, style = report.context, "dim" if report.doubts else ""
    name = context["model"] + ("" if context.get("lossless", True) else f", {context['verification']}")
    title = f"{name}: {context.get('num_live_prompts')} prompts decoded; predicted and replayed speed, over the decoded; tokens "
    title += "discarded and forward passes of the target, per emitted token, with 95 % intervals over prompts"
    title = escape(title + (", not to be trusted" if report.doubts else ""))
    table = Table(title=title, **NARROW, style=style, row_styles=[style])
    table.add_column("setting", min_width=14)
    for column in LIVE:
        table.add_column(column, justify="right", no_wrap=True)
    for row in report.live:
        rates = [f"{i.value:.3f} \u00b1{(i.high - i.low) / 2:.3f}" for i in (row.discard_rate, row.verification_rate)]
        accepted = "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.2f}"
        p50, *others = (_number(row.milliseconds[f"p{level}"]) for level in LEVELS)
        guesses = [_difference(guess, row) for guess in (row.predicted_tokens_per_second, row.replayed_tokens_per_second)]
        speed = f"{row.tokens_per_second.value:,.0f}\n{row.speedup.value:.2f}x"
        pairs = ("\n".join(pair) for pair in (guesses, rates, [f"{row.block_efficiency:.2f}", accepted], [p50, "/".join(others)]))
        table.add_row(escape(row.name), speed, *pairs)
    console.print(table)
    if report.fit:
        console.print(fit_text(report.fit), highlight=False, style=style)
    _print_gains(report.gains, console, style)
    for row in report.live:
        if row.efficiency_gain:
            gain = f"block efficiency {_percent(row.efficiency_gain)} over {context.get('verification')}"
            console.print(f"{escape(row.name)}: {gain}", style=style)


def batch_table(batches: BatchTable, doubtful: bool = False) -> Table:
    """Return the table of one number of rows, which fits 80 columns."""
    title = f"{batches.concurrency} at once: {batches.num_requests} requests decoded; tokens per second of all together and of "
    title += "a request in its row, each over the target alone; milliseconds p50/p90/p99"
    style = "dim" if doubtful else ""
    table = Table(title=title + (", not to be trusted" if doubtful else ""), **NARROW, style=style, row_styles=[style])
    table.add_column("setting", min_width=14)
    for column in BATCHES:
        table.add_column(column, justify="right", no_wrap=True)
    for row in batches.rows:
        table.add_row(escape(row.name), *_batch_cells(row))
    return table


def _batch_cells(row: BatchRow) -> list[str]:
    return [
        f"{_number(row.tokens_per_second)}\n{row.over_alone:.2f}x",
        f"{_number(row.request_tokens_per_second)}\n{_speedup(row.speedup)}",
        "\n".join("/".join(_number(times[f"p{level}"]) for level in LEVELS) for times in (row.token_ms, row.first_token_ms)),
        f"{row.tokens_per_round:.2f}",
    ]


def _number(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1}f}"


def _print_gains(gains: Mapping[str, Interval | None], console: Console, style: str) -> None:
    for ratio, gain in gains.items():
        if gain is not None:
            console.print(f"decoded, head over best fixed K at {ratio_name(ratio)}: {_percent(gain)}", style=style, markup=False)


def _difference(guess: float | None, row: LiveRow) -> str:
    return "-" if guess is None else f"{guess / row.tokens_per_second.value - 1:+.1%}"


def _percent(gain: Interval) -> str:
    return f"{gain.value - 1:+.1%} [{gain.low - 1:+.1%}, {gain.high - 1:+.1%}]"
