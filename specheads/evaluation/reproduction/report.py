"""An experiment on the console and as `reproduction.json`: what each method measured, and the claims."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specheads.claims import CheckedClaim
from specheads.evaluation.intervals import Interval
from specheads.evaluation.reproduction.metrics import METRICS
from specheads.storage.files import write_json

WIDTH = 80  # columns where the output is no terminal
METRICS_PER_TABLE = 4


@dataclass(frozen=True)
class Reproduced:
    """The result of an experiment; `provenance` is all that decides it and does not depend on the machine."""

    experiment: str
    command: str
    provenance: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Interval]]  # by name: the metrics that apply
    claims: Sequence[CheckedClaim]

    def as_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        methods = {name: {metric: asdict(value) for metric, value in row.items()} for name, row in self.methods.items()}
        result = {"experiment": self.experiment, "command": self.command, **self.provenance}
        return {**result, "methods": methods, "claims": [claim.as_json() for claim in self.claims]}


def write_result(result: Reproduced, folder: Path) -> Path:
    """Write `reproduction.json` into a folder; return its path."""
    path = folder / "reproduction.json"
    write_json(path, result.as_json())
    return path


def print_result(result: Reproduced, console: Console | None = None) -> None:
    """Print tables of the methods, a few metrics each, and the table of the claims."""
    console = console or Console(width=None if sys.stdout.isatty() else WIDTH)
    used = [name for name in METRICS if any(row.get(name, _NONE).high for row in result.methods.values())]
    for start in range(0, len(used), METRICS_PER_TABLE):
        console.print(methods_table(result, used[start : start + METRICS_PER_TABLE]))
    if result.claims:
        console.print(claims_table(result.claims))


_NONE = Interval(0, 0, 0)


def methods_table(result: Reproduced, metrics: Sequence[str]) -> Table:
    """Return a row for each method: its metrics with half the widths of their intervals."""
    table = Table("method", caption="± half of the 95 % interval over groups of prompts")
    for name in metrics:
        table.add_column(METRICS[name].title, justify="right")
    for name, row in result.methods.items():
        table.add_row(escape(name), *(half_width(row[metric]) if metric in row else "" for metric in metrics))
    return table


def claims_table(claims: Sequence[CheckedClaim]) -> Table:
    """Return a row for each claim: our value, the published one, their ratio, and whether it held."""
    table = Table("claim", "ours [95 %]", "paper", "ratio", "outcome", show_lines=True)
    for claim in claims:
        ratio = "" if claim.ratio is None else f"{claim.ratio:.2f}"
        table.add_row(escape(claim.says), escape(claim.ours), claim.published or "", ratio, claim.outcome)
    return table


def half_width(estimate: Interval) -> str:
    """Return a value and half the width of its interval as text."""
    half, digits = (estimate.high - estimate.low) / 2, 0 if estimate.value >= 100 else 1 if estimate.value >= 10 else 3
    return f"{estimate.value:.{digits}f} ±{half:.{digits}f}"
