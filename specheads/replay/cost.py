"""Step costs, fitted to decoded rounds by medians, because on a busy machine a few rounds are very
slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from specheads.decoding.step_costs import RuleCosts, StepCosts, non_decreasing
from specheads.errors import UserError

LEAST_ROUNDS = 5  # a median of fewer rounds with one number of drafted tokens is left out


@dataclass(frozen=True)
class RoundTimes:
    """The counts and times of rounds of live decoding: arrays (R,)."""

    draft_calls: np.ndarray
    drafted: np.ndarray
    draft_seconds: np.ndarray
    target_seconds: np.ndarray  # verification and the steps after it
    rule: np.ndarray  # number of the kind of rule that decoded the round
    response: np.ndarray  # number of the round's response; even and odd ones make two halves

    def part(self, which: np.ndarray) -> "RoundTimes":
        return RoundTimes(*(column[which] for column in vars(self).values()))


@dataclass(frozen=True)
class CostFit:
    """StepCosts that were fitted to live rounds: those common to all rules, and what each kind of
    rule adds, by its name.
    """

    costs: StepCosts
    rules: Mapping[str, RuleCosts] = field(default_factory=dict)
    num_rounds: int = 0


def fit_costs(
    times: RoundTimes, rules: Mapping[str, bool], shares: Mapping[str, float] = MappingProxyType({})
) -> tuple[CostFit, tuple[CostFit, CostFit] | None]:
    """Fit costs to rounds by medians: of the rounds with equal numbers of drafted tokens, and then
    over these medians.

    Returns the costs, and those for the even and for the odd responses, each fitted to the other
    half; None with too few responses. Raises UserError for fewer than three rounds, or rounds of
    one length only, which cannot separate the costs.

    Args:
        rules: the kinds by name, in the order of their numbers; True for those that compute nothing
            worth counting (fixed lengths). The seconds of their rounds are common to all rules;
            those of other rules are compared with them.
        shares: by kind, what it adds to a draft step as a share of the step, where steps were timed
            by themselves.
    """
    if len(times.drafted) < 3 or len(np.unique(times.drafted)) < 2:
        raise UserError(
            "these runs cannot separate the costs of draft and target; evaluate at least two draft"
            " lengths."
        )
    fit = _fit(times, rules, shares)
    even = times.response % 2 == 0
    if len(np.unique(times.response)) < 4 or any(
        len(np.unique(times.drafted[half])) < 2 for half in (even, ~even)
    ):
        return fit, None
    return fit, (_fit(times.part(~even), rules, shares), _fit(times.part(even), rules, shares))


def _fit(times: RoundTimes, rules: Mapping[str, bool], shares: Mapping[str, float]) -> CostFit:
    is_plain = np.array(list(rules.values()))[times.rule]
    if not is_plain.any() or len(np.unique(times.drafted[is_plain])) < 2:
        is_plain[:] = True
    common = times.part(is_plain)
    draft_seconds, round_seconds = _line(*_medians(common.draft_calls, common.draft_seconds))
    number, seconds, weight = _medians(common.drafted, common.target_seconds)
    verified_seconds, target_seconds = _line(number, seconds, weight)
    seconds = non_decreasing(seconds, weight)
    if number[0] > 0:
        number = np.append(0, number)
        seconds = np.append(min(target_seconds, seconds[0]), seconds)
    table = np.interp(np.arange(number[-1] + 1), number, seconds)
    costs = StepCosts(
        draft_seconds, float(table[0]), verified_seconds, round_seconds, tuple(table.tolist())
    )
    added = {
        name: (
            RuleCosts()
            if plain
            else _added_costs(costs, times.part(times.rule == number), shares.get(name))
        )
        for number, (name, plain) in enumerate(rules.items())
    }
    return CostFit(costs, added, num_rounds=len(times.drafted))


def _added_costs(costs: StepCosts, times: RoundTimes, share: float | None) -> RuleCosts:
    """Return the seconds of one rule's rounds beyond the common costs.

    No rule makes a step faster, so they are at least 0.
    """
    if not len(times.drafted):
        return RuleCosts()
    calls, drafting, weight = _medians(times.draft_calls, times.draft_seconds)
    some = calls > 0
    step = 0.0 if share is None else share * costs.draft_seconds
    if share is None and some.any():
        more = (drafting[some] - costs.round_seconds) / calls[some] - costs.draft_seconds
        step = _weighted_median(more, weight[some] * calls[some])
    number, verifying, weight = _medians(times.drafted, times.target_seconds)
    return RuleCosts(
        max(step, 0.0), max(_weighted_median(verifying - costs.verify_seconds(number), weight), 0.0)
    )


def _medians(number: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each number that rounds have, without rare ones, with the median seconds and the count
    of those rounds.
    """
    numbers, which, counts = np.unique(number, return_inverse=True, return_counts=True)
    medians = np.array([np.median(seconds[which == index]) for index in range(len(numbers))])
    often = counts >= LEAST_ROUNDS
    often = often if often.sum() >= 2 else np.ones_like(often)
    return numbers[often].astype(int), medians[often], counts[often]


def _line(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Return slope and intercept, neither below 0, of the line by the weighted median of the slopes
    of pairs (Theil-Sen).
    """
    first, second = np.triu_indices(len(x), 1)
    distance = (x[second] - x[first]).astype(float)
    slope = 0.0
    if len(distance):
        slope = max(
            _weighted_median(
                (y[second] - y[first]) / distance, weight[first] * weight[second] * distance
            ),
            0.0,
        )
    intercept = _weighted_median(y - slope * x, weight)
    if intercept < 0:
        slope = max(_weighted_median(y[x > 0] / x[x > 0], (weight * x)[x > 0]), 0.0)
        intercept = 0.0
    return slope, intercept


def _weighted_median(values: np.ndarray, weight: np.ndarray) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
