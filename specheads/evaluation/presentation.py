"""A report on the console, as files, and in Weights & Biases."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from specheads.evaluation import conclusions
from specheads.evaluation.report import Report, Verdict
from specheads.evaluation.tables import batch_table, live_table, verdict_table, winners_table
from specheads.storage.files import write_json, write_whole
from specheads.table import print_table


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.html and report.json; return their paths."""
    from specheads.evaluation.page.document import html_of  # imports plotly

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "report.html", folder / "report.json"]
    write_whole(written[0], lambda path: path.write_text(html_of(report), encoding="utf-8"))
    write_json(written[1], asdict(report))
    return written


def print_report(report: Report, console: Console | None = None, verbose: bool = False) -> None:
    """Print what to use and what that rests on.

    With `verbose`, all tables of the test prompts before it.
    """
    console = console or Console()
    if verbose:
        _print_tables(report, console)
    if report.verdict is not None:
        _print_verdict(report, report.verdict, console)
    for batches in [] if report.doubts else report.batches:
        row = conclusions.fastest_of(batches)
        _say(
            console,
            f"{batches.concurrency} requests at once: {row.name} was the fastest on these same"
            f" prompts, {row.over_alone:.2f}× the target alone.",
        )
    _say(console, *conclusions.warnings_of(report))


def _say(console: Console, *texts: str, style: str = "") -> None:
    for text in texts:
        console.print(text, highlight=False, markup=False, style=style)


def _print_tables(report: Report, console: Console) -> None:
    tests = [data for data in report.data_sets if data.role == "test"]
    for data in tests:
        for ratio in conclusions.ratios_of(report):
            if conclusions.winners_at(data, ratio):
                print_table(winners_table(report, data, ratio), console)
    for data in tests:
        if data.information:
            _say(console, f"{data.name}: {conclusions.information_text(data.information)}.")
    if report.live:
        print_table(live_table(report), console)
    for batches in report.batches:
        print_table(batch_table(report, batches), console)
    _say(console, *report.doubts)


def _print_verdict(report: Report, verdict: Verdict, console: Console) -> None:
    answer = verdict.answer
    _say(console, f"Use: {answer.choices[answer.use].name}", style="bold")
    _say(console, conclusions.use_text(answer), verdict.rests_on, *verdict.decoded)
    if verdict.doubt:
        _say(console, f"Timing unreliable here: {verdict.doubt}.")
    print_table(verdict_table(report, answer), console)
    if answer.skip_head:
        _say(console, f"Skip the head: {answer.skip_head}.")
    changes = conclusions.changes_text(report, verdict)
    _say(console, f"Another ratio changes the winner: {changes}.")


def log_report(report: Report, loggers: Sequence[object]) -> None:
    """Log the page to every W&B logger of Lightning; others have no place for it."""
    from lightning.pytorch.loggers import WandbLogger  # slow to import

    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            from specheads.evaluation.page.document import html_of  # imports plotly

            context = {key: value for key, value in report.context.items() if key != "config"}
            logger.log_hyperparams(context | {"doubts": list(report.doubts)})
            logger.experiment.log({"report": wandb.Html(html_of(report), inject=False)})
