"""What an experiment found: its claims checked, and tables on the console."""

import sys
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specheads.errors import UserError
from specheads.evaluation.intervals import Groups, Interval, cross_fitted_gain, interval, resample_counts
from specheads.papers.claims import CheckedClaim, direction
from specheads.papers.reproduction.settings import METRICS, Claim, Comparison, Tally, priced, samples, sums

Tallies = Mapping[str, Tally]  # the key is the method
Measured = Mapping[str, Mapping[str, Interval]]  # the metrics that apply to each method
WIDTH = 80  # columns where the output is no terminal
METRICS_PER_TABLE = 4


def checked(claim: Claim, tallies: Tallies, groups: Groups) -> CheckedClaim:
    """Return a claim with the value of its metric or ratio, its 95 % interval over groups of prompts, and the outcome.

    Compared with another ratio, the value is the ratio of both, and published is that of both, too.
    """
    if claim.ratio is not None:
        tallies = {name: priced(tally, claim.ratio) for name, tally in tallies.items()}
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
    return not any(np.isnan(sums(tallies[name], claim.metric)).any() for name in claim.methods)


def _estimated(claim: Claim, tallies: Tallies, groups: Groups) -> Interval:
    if len(claim.of) > 1 or len(claim.over) > 1:
        ours, theirs = (np.stack([sums(tallies[name], claim.metric) for name in names]) for names in (claim.of, claim.over))
        return cross_fitted_gain(ours, theirs, groups)
    counts = resample_counts(groups)
    values = _compared(claim, claim.metric, tallies, counts)
    if isinstance(claim.than, Comparison):
        values = values / _compared(claim.than, claim.metric, tallies, counts)
    return interval(values)


def _compared(comparison: Comparison, metric: str, tallies: Tallies, counts: np.ndarray) -> np.ndarray:
    """Return a metric (1 + R,) of a method, over that of another if there is one; raises UserError where it does not apply."""
    values = []
    for name in (*comparison.of, *comparison.over):
        value = samples(tallies[name], metric, counts)
        if value is None:
            raise UserError(f"{metric} of {name} is not defined, because nothing was drafted; compare another metric or method.")
        values.append(value)
    return values[0] / values[1] if len(values) > 1 else values[0]


def measured(tallies: Tallies, metrics: Sequence[str], groups: Groups) -> Measured:
    """Return by method and metric the values with their intervals, of the metrics that apply."""
    counts = resample_counts(groups)
    values = {name: {metric: samples(tally, metric, counts) for metric in metrics} for name, tally in tallies.items()}
    return {
        name: {metric: interval(value) for metric, value in of_method.items() if value is not None}
        for name, of_method in values.items()
    }


def print_result(methods: Measured, claims: Sequence[CheckedClaim]) -> None:
    """Print tables of the methods, a few metrics each, and the table of the claims."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    used = [name for name in METRICS if any(name in row and row[name].high for row in methods.values())]
    for start in range(0, len(used), METRICS_PER_TABLE):
        table = Table("method", caption="± half of the 95 % interval over groups of prompts")
        metrics = used[start : start + METRICS_PER_TABLE]
        for metric in metrics:
            table.add_column(METRICS[metric].title, justify="right")
        for name, row in methods.items():
            table.add_row(escape(name), *(_half_width(row[metric]) if metric in row else "" for metric in metrics))
        console.print(table)
    if claims:
        table = Table("claim", "ours [95 %]", "paper", "ratio", "outcome", show_lines=True)
        for claim in claims:
            ratio = "" if claim.ratio is None else f"{claim.ratio:.2f}"
            table.add_row(escape(claim.says), escape(claim.ours), claim.published or "", ratio, claim.outcome)
        console.print(table)


def _half_width(estimate: Interval) -> str:
    half, digits = (estimate.high - estimate.low) / 2, 0 if estimate.value >= 100 else 1 if estimate.value >= 10 else 3
    return f"{estimate.value:.{digits}f} ±{half:.{digits}f}"
