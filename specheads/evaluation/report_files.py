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
    comparisons,
    live_table,
    quality_table,
    ratio_tables,
    terminal,
)
from specheads.storage.files import write_json, write_whole


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.html, report.json, report.csv; return their paths."""
    from specheads.evaluation.page.document import write_page  # imports plotly

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / name for name in ("report.html", "report.json", "report.csv")]
    write_page(report, written[0])
    write_json(written[1], asdict(report))
    write_whole(written[2], lambda path: _write_csv(report, path))
    return written


def _write_csv(report: Report, path: Path) -> None:
    """Write a row for every rule of every data set and every setting that was decoded, alone and in batches.

    There is a column for every key; keys of nested mappings are named `outer.inner`.
    """

    def row(values: RuleRow | LiveRow | BatchRow, **where: Any) -> dict[str, Any]:
        left_out = {*rule_fields(values), "verification"}  # the family says it
        return where | _flat({name: value for name, value in asdict(values).items() if name not in left_out})

    rows = [row(rule, data_set=data.name, how="replayed") for data in report.data_sets for rule in data.rules]
    rows += [row(setting, how="decoded") for setting in report.live]
    for table in report.batches:
        sizes = {"concurrency": table.concurrency, "num_requests": table.num_requests}
        rows += [row(setting, how="decoded in batches", **sizes) for setting in table.rows]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(dict.fromkeys(key for each in rows for key in each)))
        writer.writeheader()
        writer.writerows(rows)


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
        say([*comparisons(report), ABOUT_QUALITY])
    for batches in report.batches:
        show(batch_table(report, batches), trusted)
    say([*(batch_findings(report) if trusted else []), *report.notes])


def log_report(report: Report, loggers: Sequence[Any]) -> None:
    """Log tables and plots to every W&B logger of Lightning; others have no place for them."""
    from lightning.pytorch.loggers import WandbLogger

    for logger in loggers:
        if isinstance(logger, WandbLogger):
            context = {key: value for key, value in report.context.items() if key != "config"}
            logger.log_hyperparams(context | {"doubts": list(report.doubts)})
            logger.experiment.log(contents(report))


def contents(report: Report) -> dict[str, Any]:
    """Return the logged tables and figures, without measured figures that are not to be trusted: then the doubts are logged."""
    import wandb

    from specheads.evaluation.page.figures import DOUBTFUL, figures_of  # imports plotly

    ratios = [ratio for ratio in ratios_of(report) if is_trusted(report, ratio)]
    parts: dict[str, list[tuple[str, Table]]] = {}
    for name, ratio, table in ratio_tables(report, ratios, roles=("dev", "test")):
        parts.setdefault(name, []).append((ratio, table))
    if quality := quality_table(report):
        parts["quality"] = [("decoded", quality)]
    if report.live and not report.doubts:
        parts["live"] = [("decoded", live_table(report))]
    if report.batches and not report.doubts:
        parts["batches"] = [(f"{batches.concurrency} at once", batch_table(report, batches)) for batches in report.batches]
    logged = {name: _logged(tables) for name, tables in parts.items()}
    if report.doubts:
        logged["doubts"] = (["what was measured is not to be trusted"], [[doubt] for doubt in report.doubts])
    drawn = {
        f"{name}/{key}": wandb.Plotly(figure)
        for name, some in figures_of(report).items()
        for key, figure in some.items()
        if figure.layout.meta != DOUBTFUL
    }
    return {name: wandb.Table(columns=list(columns), data=rows) for name, (columns, rows) in logged.items()} | drawn


def _logged(parts: Sequence[tuple[str, Table]]) -> tuple[Sequence[str], list[list[Any]]]:
    """Return columns and rows of tables of equal columns as plain values; the first column says which table a row is of.

    A value is the number that a cell is sorted by, next to its limits where a column has any.
    """
    columns, every = parts[0][1].columns, [(name, row.cells) for name, table in parts for row in table.rows]
    limited = [any(cells[number].limits is not None for _, cells in every) for number in range(len(columns))]
    names = ["of"]
    rows: list[list[Any]] = [[name] for name, _ in every]
    for number, column in enumerate(columns):
        names += [column, f"{column}, limits"][: 1 + limited[number]]
        for row, (_, cells) in zip(rows, every, strict=True):
            cell = cells[number]
            row += [cell.text if cell.key is None else cell.key, cell.limits][: 1 + limited[number]]
    return names, rows
