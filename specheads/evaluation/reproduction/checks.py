"""The check of an experiment's claims: our value with its interval, the published value, and whether the direction held."""

from collections.abc import Mapping, Sequence

import numpy as np

from specheads.claims import CheckedClaim, direction
from specheads.errors import UserError
from specheads.evaluation.intervals import Groups, Interval, cross_fitted_gain, interval, resample_counts
from specheads.evaluation.reproduction.metrics import Tally
from specheads.evaluation.reproduction.settings import Claim, Comparison

Tallies = Mapping[str, Tally]


def checked(claim: Claim, tallies: Tallies, groups: Groups) -> CheckedClaim:
    """Return a claim with the value of its metric or ratio, its 95 % interval over groups of prompts, and the outcome.

    Compared with another ratio, the value is the ratio of both, and published is that of both, too.
    """
    estimate, neutral = estimated(claim, tallies, groups), 1.0 if claim.over else 0.0
    if claim.than is not None and not isinstance(claim.than, Comparison):
        neutral = claim.than
    outcome = direction(estimate.low, estimate.value, estimate.high, claim.expected, neutral)
    expectation = f"expected {claim.expected} than {neutral:g}"
    return CheckedClaim(
        claims=claim.claims,
        says=claim.says,
        ours=with_limits(estimate),
        published=None if claim.published is None else f"{claim.published:g}",
        outcome=outcome,
        ratio=estimate.value / claim.published if claim.published else None,
        why=claim.note if outcome == "held" else "; ".join(filter(None, (expectation, claim.note))),
    )


def estimated(claim: Claim, tallies: Tallies, groups: Groups) -> Interval:
    """Return the value that a claim is about, with its interval."""
    if len(claim.of) > 1 or len(claim.over) > 1:
        ours, theirs = (np.stack([tallies[name].rows(claim.metric) for name in names]) for names in (claim.of, claim.over))
        return cross_fitted_gain(ours, theirs, groups)
    counts = resample_counts(groups)
    values = compared(claim, claim.metric, tallies, counts)
    if isinstance(claim.than, Comparison):
        values = values / compared(claim.than, claim.metric, tallies, counts)
    return interval(values)


def compared(comparison: Comparison, metric: str, tallies: Tallies, counts: np.ndarray) -> np.ndarray:
    """Return a metric (1 + R,) of a method, over that of another if there is one.

    Raises:
        UserError: a method that the metric does not apply to.
    """
    values = [known(metric, name, tallies, counts) for name in (*comparison.of, *comparison.over)]
    return values[0] / values[1] if len(values) > 1 else values[0]


def known(metric: str, name: str, tallies: Tallies, counts: np.ndarray) -> np.ndarray:
    """Return a metric (1 + R,) of a method; raises UserError if the method has none."""
    values = tallies[name].samples(metric, counts)
    if values is None:
        raise UserError(f"{metric} of {name} is not defined, because nothing was drafted; compare another metric or method.")
    return values


def measured(tallies: Tallies, metrics: Sequence[str], groups: Groups) -> dict[str, dict[str, Interval]]:
    """Return by method and metric the values with their intervals, of the metrics that apply."""
    counts = resample_counts(groups)
    samples = {name: {metric: tally.samples(metric, counts) for metric in metrics} for name, tally in tallies.items()}
    return {
        name: {metric: interval(values) for metric, values in of_method.items() if values is not None}
        for name, of_method in samples.items()
    }


def with_limits(estimate: Interval) -> str:
    """Return a value with its interval as text: 1.083 [1.061, 1.112]."""
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
