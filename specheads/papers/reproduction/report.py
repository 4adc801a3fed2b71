"""What an experiment found: its claims checked, on the console and as `reproduction.json`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specheads.errors import UserError
from specheads.evaluation.intervals import Groups, Interval, cross_fitted_gain, interval, resample_counts
from specheads.papers.claims import CheckedClaim, direction
from specheads.papers.reproduction.settings import METRICS, Claim, Comparison, Tally
from specheads.storage.files import write_json

Tallies = Mapping[str, Tally]
WIDTH = 80  # columns where the output is no terminal
METRICS_PER_TABLE = 4


def checked(claim: Claim, tallies: Tallies, groups: Groups) -> CheckedClaim:
    """Return a claim with the value of its metric or ratio, its 95 % interval over groups of prompts, and the outcome.

    Compared with another ratio, the value is the ratio of both, and published is that of both, too.
    """
    estimate, neutral = _estimated(claim, tallies, groups), 1.0 if claim.over else 0.0
    if claim.than is not None and not isinstance(claim.than, Comparison):
        neutral = claim.than
    outcome = direction(estimate.low, estimate.value, estimate.high, claim.expected, neutral)
    expectation = f"expected {claim.expected} than {neutral:g}"
    return CheckedClaim(
        claims=claim.claims,
        says=claim.says,
        ours=f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]",
        published=None if claim.published is None else f"{claim.published:g}",
        outcome=outcome,
        ratio=estimate.value / claim.published if claim.published else None,
        why=claim.note if outcome == "held" else "; ".join(filter(None, (expectation, claim.note))),
    )


def is_measured(claim: Claim, tallies: Tallies) -> bool:
    """Return whether what a claim is about was measured: energy is not everywhere."""
    return claim.metric != "joules_per_token" or all(None not in tallies[name].joules for name in claim.methods)


def _estimated(claim: Claim, tallies: Tallies, groups: Groups) -> Interval:
    """Return the value that a claim is about, with its interval."""
    if len(claim.of) > 1 or len(claim.over) > 1:
        ours, theirs = (np.stack([tallies[name].rows(claim.metric) for name in names]) for names in (claim.of, claim.over))
        return cross_fitted_gain(ours, theirs, groups)
    counts = resample_counts(groups)
    values = _compared(claim, claim.metric, tallies, counts)
    if isinstance(claim.than, Comparison):
        values = values / _compared(claim.than, claim.metric, tallies, counts)
    return interval(values)


def _compared(comparison: Comparison, metric: str, tallies: Tallies, counts: np.ndarray) -> np.ndarray:
    """Return a metric (1 + R,) of a method, over that of another if there is one.

    Raises:
        UserError: a method that the metric does not apply to.
    """
    values = []
    for name in (*comparison.of, *comparison.over):
        value = tallies[name].samples(metric, counts)
        if value is None:
            raise UserError(f"{metric} of {name} is not defined, because nothing was drafted; compare another metric or method.")
        values.append(value)
    return values[0] / values[1] if len(values) > 1 else values[0]


def measured(tallies: Tallies, metrics: Sequence[str], groups: Groups) -> dict[str, dict[str, Interval]]:
    """Return by method and metric the values with their intervals, of the metrics that apply."""
    counts = resample_counts(groups)
    samples = {name: {metric: tally.samples(metric, counts) for metric in metrics} for name, tally in tallies.items()}
    return {
        name: {metric: interval(values) for metric, values in of_method.items() if values is not None}
        for name, of_method in samples.items()
    }


@dataclass(frozen=True)
class Reproduced:
    """The result of an experiment; `provenance` is all that decides it and does not depend on the machine."""

    experiment: str
    command: str
    provenance: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Interval]]  # by name: the metrics that apply
    claims: Sequence[CheckedClaim]


def write_result(result: Reproduced, folder: Path) -> Path:
    """Write `reproduction.json` into a folder; return its path."""
    path = folder / "reproduction.json"
    methods = {name: {metric: asdict(value) for metric, value in row.items()} for name, row in result.methods.items()}
    head = {"experiment": result.experiment, "command": result.command, **result.provenance}
    write_json(path, {**head, "methods": methods, "claims": [asdict(claim) for claim in result.claims]})
    return path


def print_result(result: Reproduced, console: Console | None = None) -> None:
    """Print tables of the methods, a few metrics each, and the table of the claims."""
    console = console or Console(width=None if sys.stdout.isatty() else WIDTH)
    used = [name for name in METRICS if any(row.get(name, _NONE).high for row in result.methods.values())]
    for start in range(0, len(used), METRICS_PER_TABLE):
        console.print(_methods_table(result, used[start : start + METRICS_PER_TABLE]))
    if result.claims:
        console.print(_claims_table(result.claims))


_NONE = Interval(0, 0, 0)


def _methods_table(result: Reproduced, metrics: Sequence[str]) -> Table:
    """Return a row for each method: its metrics with half the widths of their intervals."""
    table = Table("method", caption="± half of the 95 % interval over groups of prompts")
    for name in metrics:
        table.add_column(METRICS[name].title, justify="right")
    for name, row in result.methods.items():
        table.add_row(escape(name), *(_half_width(row[metric]) if metric in row else "" for metric in metrics))
    return table


def _claims_table(claims: Sequence[CheckedClaim]) -> Table:
    """Return a row for each claim: our value, the published one, their ratio, and whether it held."""
    table = Table("claim", "ours [95 %]", "paper", "ratio", "outcome", show_lines=True)
    for claim in claims:
        ratio = "" if claim.ratio is None else f"{claim.ratio:.2f}"
        table.add_row(escape(claim.says), escape(claim.ours), claim.published or "", ratio, claim.outcome)
    return table


def _half_width(estimate: Interval) -> str:
    """Return a value and half the width of its interval as text."""
    half, digits = (estimate.high - estimate.low) / 2, 0 if estimate.value >= 100 else 1 if estimate.value >= 10 else 3
    return f"{estimate.value:.{digits}f} ±{half:.{digits}f}"
