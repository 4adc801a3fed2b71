"""A report as files (`report.html`, `report.json`), on the console, and on Weights & Biases."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from specheads.evaluation.conclusions import key_findings, live_texts, preferred, ratios_of, winners_at
from specheads.evaluation.report import MEASURED, Report
from specheads.evaluation.tables import bank_table, batch_table, live_table, terminal, winners_table
from specheads.storage.files import write_json, write_whole


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.html and report.json; return their paths."""
    from specheads.evaluation.page.document import html_of  # imports plotly

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / name for name in ("report.html", "report.json")]
    write_whole(written[0], lambda path: path.write_text(html_of(report), encoding="utf-8"))
    write_json(written[1], asdict(report))
    return written


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the tables of a report, at the measured costs and at the ratio that the page shows first, and what it found."""
    console, every = console or Console(), ratios_of(report)
    ratios = [ratio for ratio in every if ratio in (MEASURED, preferred(every))]
    tests = [data for data in report.data_sets if data.role == "test"]
    tables = [winners_table(report, data, ratio) for data in tests for ratio in ratios if winners_at(data, ratio)]
    tables += [bank_table(report, ratio) for ratio in ratios if report.bank]
    tables += [live_table(report)] if report.live else []
    tables += [batch_table(report, batches) for batches in report.batches]

    def say(texts: Iterable[str], style: str = "") -> None:
        for text in texts:
            console.print(text, highlight=False, markup=False, style=style)

    say(report.doubts, "bold")
    for table in tables:
        for part in terminal(table, console.width, "dim" if table.doubtful else ""):
            console.print(part)
    say(live_texts(report), "dim" if report.doubts else "")
    say([*key_findings(report), *report.notes])


def log_report(report: Report, loggers: Sequence[Any]) -> None:
    """Log the page to every W&B logger of Lightning; others have no place for it."""
    from lightning.pytorch.loggers import WandbLogger  # slow to import

    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            from specheads.evaluation.page.document import html_of  # imports plotly

            context = {key: value for key, value in report.context.items() if key != "config"}
            logger.log_hyperparams(context | {"doubts": list(report.doubts)})
            logger.experiment.log({"report": wandb.Html(html_of(report), inject=False)})
