"""Claims of papers next to what is computed or measured here, whether they held, and the sections
of the theory's report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specheads.errors import UserError
from specheads.papers.reproduction.settings import Claim, Comparison, Tally, priced, samples, sums
from specheads.replay.intervals import (
    Groups,
    Interval,
    cross_fitted_gain,
    interval,
    resample_counts,
)

Tallies = Mapping[str, Tally]  # the key is the method
Measured = Mapping[str, Mapping[str, Interval]]  # the metrics that apply to each method
Outcome = Literal["held", "held weakly", "did not hold"]


@dataclass(frozen=True)
class CheckedClaim:
    """A claim, with our value and the published one as text, their ratio where both are numbers,
    and whether it held.

    It held weakly where its direction is right, but an interval includes the opposite.
    """

    claims: tuple[str, ...]  # ids of the items in benchmarks/papers.yaml that it answers
    says: str
    ours: str
    published: str | None
    outcome: Outcome
    ratio: float | None = None  # ours over the published value
    why: str = ""  # what else to know; needed where it did not hold


def direction(
    low: float, value: float, high: float, expected: Literal["more", "less"], neutral: float
) -> Outcome:
    """Return whether a value with its 95 % interval lies on the expected side of `neutral`, a
    ratio's 1 or a difference's 0.
    """
    if expected == "less":
        low, value, high, neutral = -high, -value, -low, -neutral
    if low > neutral:
        return "held"
    return "held weakly" if value > neutral else "did not hold"


def computed(
    claims: tuple[str, ...], says: str, ours: str, published: str | None, holds: bool, why: str = ""
) -> CheckedClaim:
    """Return a claim that holds or does not."""
    return CheckedClaim(claims, says, ours, published, "held" if holds else "did not hold", why=why)


def equality(
    claims: tuple[str, ...],
    says: str,
    error: float,
    most: float,
    published: str = "equality",
    why: str = "",
) -> CheckedClaim:
    """Return a claim that two numbers are equal: held if they differ by at most `most`, the
    precision they are computed with.
    """
    return computed(claims, says, f"equal within {error:.0e}", published, error <= most, why)


@dataclass(frozen=True)
class ReportSection:
    """One subject of the theory: a table, whose values are text or numbers, and claims."""

    key: str
    title: str
    source: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    claims: Sequence[CheckedClaim]
    note: str = ""


def checked(claim: Claim, tallies: Tallies, groups: Groups) -> CheckedClaim:
    """Return a claim with the value of its metric or ratio, its 95 % interval over groups of
    prompts, and the outcome.

    Compared with another ratio, the value is the ratio of both, and published is that of both, too.
    """
    if claim.ratio is not None:
        tallies = {name: priced(tally, claim.ratio) for name, tally in tallies.items()}
    estimate = _estimated(claim, tallies, groups)
    neutral = 1.0 if claim.over else 0.0
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
        ours, theirs = (
            np.stack([sums(tallies[name], claim.metric) for name in names])
            for names in (claim.of, claim.over)
        )
        return cross_fitted_gain(ours, theirs, groups)
    counts = resample_counts(groups)
    values = _compared(claim, claim.metric, tallies, counts)
    if isinstance(claim.than, Comparison):
        values = values / _compared(claim.than, claim.metric, tallies, counts)
    return interval(values)


def _compared(
    comparison: Comparison, metric: str, tallies: Tallies, counts: np.ndarray
) -> np.ndarray:
    """Return a metric (1 + R,) of a method, over that of another if there is one.

    Raises UserError where it does not apply.
    """
    values = []
    for name in (*comparison.of, *comparison.over):
        value = samples(tallies[name], metric, counts)
        if value is None:
            raise UserError(
                f"{metric} of {name} is not defined, because nothing was drafted; compare another"
                " metric or method."
            )
        values.append(value)
    return values[0] / values[1] if len(values) > 1 else values[0]


def measured(tallies: Tallies, metrics: Sequence[str], groups: Groups) -> Measured:
    """Return by method and metric the values with their intervals, of the metrics that apply."""
    counts = resample_counts(groups)
    values = {
        name: {metric: samples(tally, metric, counts) for metric in metrics}
        for name, tally in tallies.items()
    }
    return {
        name: {metric: interval(value) for metric, value in of_method.items() if value is not None}
        for name, of_method in values.items()
    }
