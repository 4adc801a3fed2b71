"""A report as files (`report.html`, `report.json`, `report.csv`, plots), on the console, and on Weights & Biases."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from specheads.evaluation.conclusions import is_trusted, key_findings, live_texts, preferred, ratios_of, winners_at
from specheads.evaluation.report import MEASURED, BatchRow, LiveRow, Report, RuleRow, rule_fields
from specheads.evaluation.tables import bank_table, batch_table, live_table, quality_table, terminal, winners_table
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
    """Print the tables of a report, at the measured costs and at the ratio that the page shows first, and what it found."""
    console, every = console or Console(), ratios_of(report)
    ratios = [ratio for ratio in every if ratio in (MEASURED, preferred(every))]
    tests = [data for data in report.data_sets if data.role == "test"]
    tables = [winners_table(report, data, ratio) for data in tests for ratio in ratios if winners_at(data, ratio)]
    tables += [bank_table(report, ratio) for ratio in ratios if report.bank]
    tables += [live_table(report)] if report.live else []
    tables += [quality] if (quality := quality_table(report)) else []
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
    """Log the page and the results to every W&B logger of Lightning; others have no place for them."""
    from lightning.pytorch.loggers import WandbLogger

    for logger in loggers:
        if isinstance(logger, WandbLogger):
            context = {key: value for key, value in report.context.items() if key != "config"}
            logger.log_hyperparams(context | {"doubts": list(report.doubts)})
            logger.experiment.log(contents(report))


def contents(report: Report) -> dict[str, Any]:
    """Return what is logged: the page, and a table of all results.

    Measured figures that are not to be trusted are on the page only, which says so.
    """
    import wandb

    from specheads.evaluation.page.document import html_of  # imports plotly

    rows = [row for row in _results(report) if not report.doubts or row["how"] == "replayed"]
    keys = dict.fromkeys(key for row in rows for key in row if is_trusted(report, MEASURED) or f".{MEASURED}." not in key)
    results = wandb.Table(columns=list(keys), data=[[row.get(key) for key in keys] for row in rows], allow_mixed_types=True)
    return {"report": wandb.Html(html_of(report), inject=False), "results": results}
