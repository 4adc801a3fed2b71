"""An evaluation on the console: the page's tables of test prompts, dimmed where measured figures are not to be trusted."""

from collections.abc import Iterator

from rich.console import Console

from specheads.evaluation.conclusions import (
    batch_findings,
    change,
    change_limits,
    costs_text,
    fit_text,
    is_trusted,
    preferred,
    ratio_name,
    ratios_of,
)
from specheads.evaluation.report import MEASURED, Report
from specheads.evaluation.table import Table, terminal
from specheads.evaluation.tables import (
    ABOUT_QUALITY,
    QUALITY_TITLE,
    bank_table,
    batch_table,
    comparisons,
    drafts_table,
    live_table,
    quality_table,
    winners_table,
)


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the tables of a report, and its notes."""
    console = console or Console()
    for doubt in report.doubts:
        console.print(doubt, highlight=False, markup=False, style="bold")
    console.print(f"Costs: {costs_text(report)}", highlight=False, markup=False)
    for ratio, table in _replayed(report):
        _show(console, table, is_trusted(report, ratio))
    trusted = is_trusted(report, MEASURED)
    if report.live:
        _show(console, live_table(report), trusted)
        for text in live_texts(report):
            console.print(text, highlight=False, markup=False, style="" if trusted else "dim")
    if quality := quality_table(report):
        console.print(QUALITY_TITLE, style="bold")
        _show(console, quality)
        for text in [*comparisons(report), ABOUT_QUALITY]:
            console.print(text, highlight=False, markup=False)
    for batches in report.batches:
        _show(console, batch_table(report, batches), trusted)
    for text in [*(batch_findings(report) if trusted else []), *report.notes]:
        console.print(text, highlight=False, markup=False)


def live_texts(report: Report) -> list[str]:
    """Return what is to be said of the decoded settings: the costs of their rounds, and the gain of heads."""
    texts = [fit_text(report.fit)] if report.fit else []
    gains = [
        f"{change(gain)} {change_limits(gain)} at {ratio_name(ratio)}" for ratio, gain in report.gains.items() if gain is not None
    ]
    if gains:
        texts.append(f"The live head over the best live fixed length, cross-fitted: {'; '.join(gains)}.")
    return texts


def _replayed(report: Report) -> Iterator[tuple[str, Table]]:
    """Yield the tables of predicted speeds, each with its ratio: of test prompts, of heads and of drafts.

    They are those at the measured costs and at the ratio that the page shows first.
    """
    every = ratios_of(report)
    ratios = [ratio for ratio in every if ratio in (MEASURED, preferred(every))]
    for data in report.data_sets:
        if data.role == "test":
            yield from ((r, winners_table(report, data, r)) for r in ratios if any(row.ratio == r for row in data.winners))
    yield from ((r, bank_table(report, r)) for r in ratios if any(r in row.speedup for row in report.bank))
    yield from ((r, drafts_table(report, r)) for r in ratios if any(r in row.speedup for row in report.drafts))


def _show(console: Console, table: Table, is_trusted: bool = True) -> None:
    for part in terminal(table, console.width, "" if is_trusted else "dim"):
        console.print(part)
