"""What is measured of the methods of an experiment, and whether a paper's claim about it held.

A tally holds what one method did: by column an array with a number for each prompt (P,).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import numpy as np

from specheads.errors import UserError
from specheads.replay.intervals import (
    Groups,
    Interval,
    halves,
    interval,
    resample_counts,
)

Tally = dict[str, np.ndarray]
Tallies = Mapping[str, Tally]  # by method
Expected = Literal["more", "less"]


class Metric(NamedTuple):
    """A ratio of the sums of two columns of a tally."""

    above: str
    below: str


METRICS = {
    "tokens_per_round": Metric("num_tokens", "num_target_calls"),
    "acceptance_rate": Metric("num_kept", "num_drafted"),
    "accepted_per_draft_step": Metric("num_accepted", "num_draft_calls"),  # GSD's acceptance rate
    "drafted_per_token": Metric("num_drafted", "num_tokens"),
    "drafted_per_round": Metric("num_drafted", "num_target_calls"),
    "discard_rate": Metric("num_discarded", "num_tokens"),
    "verification_rate": Metric("num_target_calls", "num_tokens"),
    "perplexity": Metric("nats", "num_tokens"),  # e to the power of this ratio
    "tokens_per_draft_step": Metric("num_tokens", "steps"),
    "tokens_per_charged_step": Metric("num_tokens", "charged_steps"),  # heads cost steps, too
    "divergence": Metric("divergence", "num_predicted"),  # of the head: SpecDec++, appendix C.3
    "auroc": Metric("num_in_order", "num_pairs"),  # of the head, among tokens of a prompt
    "tokens_per_second": Metric("num_tokens", "decode_seconds"),
}
EXPONENTIAL = "perplexity"
TIMED = "tokens_per_second"


class CheckedClaim(NamedTuple):
    """A claim with our value and the published one as text, and whether it held.

    It held weakly where its direction is right, but an interval includes the opposite.
    """

    claims: Sequence[str]  # ids of the items of papers.yaml that it answers
    says: str
    ours: str
    published: str | None
    outcome: str  # held, held weakly, did not hold
    ratio: float | None = None  # ours over the published value
    why: str = ""  # what else to know


@dataclass(frozen=True)
class Claim:
    """A claim of a paper about methods: a metric of one, or its ratio to that of another.

    Of several methods the best is taken, chosen on the half of the prompts that it is not compared
    on. The value is compared with a number, or (`than`) with the ratio of two other methods.
    """

    claims: Sequence[str]
    says: str
    metric: str
    of: str | Sequence[str]
    expected: Expected
    over: str | Sequence[str] = ()
    than: float | Mapping[str, str] | None = None  # None: 1 for a ratio, 0 for a value
    ratio: float | None = None  # draft steps of a target pass, if not the experiment's
    published: float | None = None
    note: str = ""

    @property
    def methods(self) -> list[str]:
        """The names of all methods that it compares."""
        others = list(self.than.values()) if isinstance(self.than, Mapping) else []
        return [*names(self.of), *names(self.over), *others]


def names(value: str | Sequence[str]) -> list[str]:
    """Return one name or several as a list."""
    return [value] if isinstance(value, str) else list(value)


def priced(tally: Tally, ratio: float) -> Tally:
    """Return a tally with its cost in draft steps, of which a target pass takes `ratio`."""
    steps = tally["draft_steps"] + ratio * tally["target_passes"]
    return tally | {"steps": steps, "charged_steps": steps + tally["head_steps"]}


def sums(tally: Tally, metric: str) -> np.ndarray:
    """Return the numbers (2, P) whose sums a metric divides; NaN where not counted."""
    unknown = np.full_like(tally["num_tokens"], np.nan)
    return np.stack([tally.get(column, unknown) for column in METRICS[metric]])


def samples(tally: Tally, metric: str, counts: np.ndarray) -> np.ndarray | None:
    """Return a metric (1 + R,) under each row of `counts` (1 + R, P); None where undefined."""
    above, below = sums(tally, metric) @ counts.T
    if not below.all() or np.isnan(above).any() or np.isnan(below).any():
        return None
    values = above / below
    return np.exp(values) if metric == EXPONENTIAL else values


def measured(
    tallies: Tallies, metrics: Sequence[str], groups: Groups
) -> dict[str, dict[str, dict[str, float]]]:
    """Return by method the metrics that are defined, with intervals over groups of prompts."""
    counts = resample_counts(groups)
    found = {}
    for name, tally in tallies.items():
        found[name] = {}
        for metric in metrics:
            values = samples(tally, metric, counts)
            if values is not None:
                found[name][metric] = asdict(interval(values))
    return found


def checked(claim: Claim, tallies: Tallies, groups: Groups) -> CheckedClaim:
    """Return a claim with its value, the 95 % interval over groups of prompts, and the outcome.

    Raises UserError where its metric is not defined.
    """
    if claim.ratio is not None:
        tallies = {name: priced(tallies[name], claim.ratio) for name in claim.methods}
    value = estimated(claim, tallies, groups)
    neutral = 1.0 if claim.over else 0.0
    if isinstance(claim.than, int | float):
        neutral = claim.than
    outcome = direction(value, claim.expected, neutral)
    why = claim.note
    if outcome != "held":
        expectation = f"expected {claim.expected} than {neutral:g}"
        why = f"{expectation}; {why}" if why else expectation
    return CheckedClaim(
        claim.claims,
        claim.says,
        ours=f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]",
        published=None if claim.published is None else f"{claim.published:g}",
        outcome=outcome,
        ratio=value.value / claim.published if claim.published else None,
        why=why,
    )


def direction(estimate: Interval, expected: Expected, neutral: float) -> str:
    """Return whether a value lies on the expected side of `neutral`, with its interval or not."""
    sign = 1 if expected == "more" else -1
    if min(sign * estimate.low, sign * estimate.high) > sign * neutral:
        return "held"
    return "held weakly" if sign * estimate.value > sign * neutral else "did not hold"


def cross_fitted_gain(ours: np.ndarray, theirs: np.ndarray, groups: Groups) -> Interval:
    """Return how much faster our best setting is than their best, as a ratio of throughputs, from
    tokens and seconds (S, 2, P).

    The best is chosen on one half of the prompts and compared on the other, both ways, so that a
    larger family has no advantage.
    """
    counts = resample_counts(groups)
    first = halves(groups)
    seconds_per_token = []
    for family in (ours, theirs):
        totals = np.zeros((2, len(counts)))
        for half in (first, ~first):
            tokens, seconds = family[..., half].sum(axis=-1).T
            totals += family[np.argmin(seconds / tokens)] @ (counts * ~half).T
        seconds_per_token.append(totals[1] / totals[0])
    return interval(seconds_per_token[1] / seconds_per_token[0])


def estimated(claim: Claim, tallies: Tallies, groups: Groups) -> Interval:
    """Return the value that a claim is about."""
    of = names(claim.of)
    over = names(claim.over)
    if len(of) > 1 or len(over) > 1:  # the best of several
        ours = np.stack([sums(tallies[name], claim.metric) for name in of])
        theirs = np.stack([sums(tallies[name], claim.metric) for name in over])
        return cross_fitted_gain(ours, theirs, groups)
    counts = resample_counts(groups)

    def value_of(name: str) -> np.ndarray:
        values = samples(tallies[name], claim.metric, counts)
        if values is None:
            raise UserError(f"{claim.metric} of {name} is not defined; nothing was drafted.")
        return values

    values = value_of(of[0])
    if over:
        values = values / value_of(over[0])
    if isinstance(claim.than, Mapping):
        values = values / (value_of(claim.than["of"]) / value_of(claim.than["over"]))
    return interval(values)
