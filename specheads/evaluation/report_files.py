"""A report as files (`report.html`, `report.json`, `report.csv`, plots), on the console, and on Weights & Biases."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from specheads.evaluation.conclusions import batch_findings, costs_text, is_trusted, live_texts, preferred, ratios_of
from specheads.evaluation.report import MEASURED, BatchRow, LiveRow, Report, RuleRow, rule_fields
from specheads.evaluation.tables import (
    ABOUT_QUALITY,
    QUALITY_TITLE,
    Table,
    batch_table,
    live_table,
    quality_table,
    ratio_tables,
    terminal,
)
from specheads.storage.files import write_json, write_whole


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.html, report.json, report.csv; return their paths."""
    from specheads.evaluation.page.document import html_of  # imports plotly

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / name for name in ("report.html", "report.json", "report.csv")]
    write_whole(written[0], lambda path: path.write_text(html_of(report), encoding="utf-8"))
    write_json(written[1], asdict(report))
    write_whole(written[2], lambda path: _write_csv(report, path))
    return written


def _write_csv(report: Report, path: Path) -> None:
    """Write every result, with a column for every key."""
    rows = _results(report)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(dict.fromkeys(key for each in rows for key in each)))
        writer.writeheader()
        writer.writerows(rows)


def _results(report: Report) -> list[dict[str, Any]]:
    """Return a row for every rule of every data set and every setting that was decoded, alone and in batches.

    Keys of nested mappings are named `outer.inner`.
    """

    def row(values: RuleRow | LiveRow | BatchRow, **where: Any) -> dict[str, Any]:
        left_out = {*rule_fields(values), "verification"}  # the family says it
        return where | _flat({name: value for name, value in asdict(values).items() if name not in left_out})

    rows = [row(rule, data_set=data.name, how="replayed") for data in report.data_sets for rule in data.rules]
    rows += [row(setting, how="decoded") for setting in report.live]
    for table in report.batches:
        sizes = {"concurrency": table.concurrency, "num_requests": table.num_requests}
        rows += [row(setting, how="decoded in batches", **sizes) for setting in table.rows]
    return rows


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the tables of a report, and its notes: at the measured costs, and at the ratio that the page shows first."""
    console = console or Console()

    def say(texts: Iterable[str], style: str = "") -> None:
        for text in texts:
            console.print(text, highlight=False, markup=False, style=style)

    def show(table: Table, is_trusted: bool = True) -> None:
        for part in terminal(table, console.width, "" if is_trusted else "dim"):
            console.print(part)

    trusted, every = is_trusted(report, MEASURED), ratios_of(report)
    say(report.doubts, "bold")
    say([f"Costs: {costs_text(report)}"])
    for _, ratio, table in ratio_tables(report, [ratio for ratio in every if ratio in (MEASURED, preferred(every))]):
        show(table, is_trusted(report, ratio))
    if report.live:
        show(live_table(report), trusted)
        say(live_texts(report), "" if trusted else "dim")
    if quality := quality_table(report):
        say([QUALITY_TITLE], "bold")
        show(quality)
        say([ABOUT_QUALITY])
    for batches in report.batches:
        show(batch_table(report, batches), trusted)
    say([*(batch_findings(report) if trusted else []), *report.notes])


def log_report(report: Report, loggers: Sequence[Any]) -> None:
    """Log the page, the results and the plots to every W&B logger of Lightning; others have no place for them."""
    from lightning.pytorch.loggers import WandbLogger

    for logger in loggers:
        if isinstance(logger, WandbLogger):
            context = {key: value for key, value in report.context.items() if key != "config"}
            logger.log_hyperparams(context | {"doubts": list(report.doubts)})
            logger.experiment.log(contents(report))


def contents(report: Report) -> dict[str, Any]:
    """Return what is logged: the page, a table of all results, and the plots.

    Measured figures that are not to be trusted are on the page only, which says so.
    """
    import wandb

    from specheads.evaluation.page.document import html_of  # imports plotly
    from specheads.evaluation.page.figures import DOUBTFUL, figures_of

    rows = [row for row in _results(report) if not report.doubts or row["how"] == "replayed"]
    keys = dict.fromkeys(key for row in rows for key in row if is_trusted(report, MEASURED) or f".{MEASURED}." not in key)
    plots = {
        f"{name}/{key}": wandb.Plotly(figure)
        for name, figures in figures_of(report).items()
        for key, figure in figures.items()
        if figure.layout.meta != DOUBTFUL
    }
    results = wandb.Table(columns=list(keys), data=[[row.get(key) for key in keys] for row in rows], allow_mixed_types=True)
    return {"report": wandb.Html(html_of(report), inject=False), "results": results, **plots}
