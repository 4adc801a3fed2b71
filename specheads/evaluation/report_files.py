"""A report as files: `report.html`, `report.json`, `report.csv` and plots."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specheads.evaluation.report import BatchRow, LiveRow, Report, RuleRow, rule_fields
from specheads.storage.files import write_json, write_whole


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.html, report.json, report.csv and plots; return their paths."""
    from specheads.evaluation.page.document import write_page  # imports plotly
    from specheads.evaluation.plots import plot_pareto, plot_speed  # imports matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / name for name in ("report.html", "report.json", "report.csv")]
    write_page(report, written[0])
    write_json(written[1], asdict(report))
    write_whole(written[2], lambda path: _write_csv(report, path))
    if report.data_sets:
        written.append(folder / "pareto.png")
        plot_pareto(report, written[-1])
    if report.live:
        written.append(folder / "speed.png")
        plot_speed(report, written[-1])
    return written


def _write_csv(report: Report, path: Path) -> None:
    """Write a row for every rule of every data set and every setting that was decoded, alone and in batches."""
    replayed = [{"data_set": data.name, "how": "replayed"} | _values(row) for data in report.data_sets for row in data.rules]
    decoded = [{"how": "decoded"} | _values(row) for row in report.live]
    batches = [
        {"how": "decoded in batches", "concurrency": table.concurrency, "num_requests": table.num_requests} | _values(row)
        for table in report.batches
        for row in table.rows
    ]
    write_rows([*replayed, *decoded, *batches], path)


def _values(row: RuleRow | LiveRow | BatchRow) -> dict[str, Any]:
    """Return the values of a row, without what the family says."""
    left_out = {*rule_fields(row), "verification"}
    return {name: value for name, value in asdict(row).items() if name not in left_out}


def write_rows(content: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a CSV file with a column for every key; keys of nested mappings are named `outer.inner`."""
    rows = [_flat(row) for row in content]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat
