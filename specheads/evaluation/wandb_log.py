"""The report on Weights & Biases, where logging is on (`logger=wandb`)."""

from collections.abc import Sequence
from typing import Any

import wandb
from lightning.pytorch.loggers import Logger, WandbLogger

from specheads.evaluation.conclusions import is_trusted, ratios_of
from specheads.evaluation.page import figures
from specheads.evaluation.report import Report
from specheads.evaluation.table import Cell, Row, Table, plain_rows
from specheads.evaluation.tables import bank_table, batch_table, drafts_table, live_table, quality_table, winners_table


def log_report(report: Report, loggers: Sequence[Logger]) -> None:
    """Log tables and plots to every W&B logger; others have no place for them."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            context = {key: value for key, value in report.context.items() if key != "config"}
            logger.log_hyperparams(context | {"doubts": list(report.doubts)})
            logger.experiment.log(contents(report))


def contents(report: Report) -> dict[str, Any]:
    """Return the logged tables and the figures.

    Tables are of winners for each data set, heads, drafts, live measurements, quality, candidates and batches.

    Where measured figures are not to be trusted, the reasons are logged in their place.
    """
    tables = {name: wandb.Table(columns=list(columns), data=rows) for name, (columns, rows) in _tables(report).items() if rows}
    drawn = {
        f"{name}/{key}": figure
        for name, some in figures.figures_of(report).items()
        for key, figure in some.items()
        if figure.layout.meta != figures.DOUBTFUL
    }
    return tables | {name: wandb.Plotly(figure) for name, figure in drawn.items()}


def _tables(report: Report) -> dict[str, tuple[list[str], list[list[Any]]]]:
    """Return columns and rows of every table by name; those without rows are not logged."""
    ratios = [ratio for ratio in ratios_of(report) if is_trusted(report, ratio)]
    tables: dict[str, list[tuple[str, Table]]] = {
        f"replay/{data.name}": [(ratio, winners_table(report, data, ratio)) for ratio in ratios] for data in report.data_sets
    }
    tables["heads"] = [(ratio, bank_table(report, ratio)) for ratio in ratios]
    tables["drafts"] = [(ratio, drafts_table(report, ratio)) for ratio in ratios]
    if report.live and not report.doubts:
        tables["live"] = [("decoded", live_table(report))]
    if quality := quality_table(report):
        tables["quality"] = [("decoded", quality)]
    if not report.doubts:
        tables["batches"] = [(f"{batches.concurrency} at once", batch_table(report, batches)) for batches in report.batches]
    logged = {name: plain_rows(_joined(parts)) for name, parts in tables.items() if parts}
    return logged | {"doubts": (["what was measured is not to be trusted"], [[doubt] for doubt in report.doubts])}


def _joined(parts: Sequence[tuple[str, Table]]) -> Table:
    """Return tables of equal columns as one, whose first column says which one a row is of."""
    rows = [Row([Cell(name, name), *row.cells]) for name, table in parts for row in table.rows]
    return Table("", ("of", *parts[0][1].columns), rows)
