"""The cost model of speculative decoding (SpecDec++, section 2): seconds from counts of forwards."""

from dataclasses import dataclass, replace

import numpy as np

from specheads.errors import UserError


@dataclass(frozen=True)
class Costs:
    """Seconds of a draft forward, of a target forward, and of the target's more for each drafted token that it verifies.

    `round_r_squared` says how well they explain the times of the `num_rounds` rounds that they were fitted to, and `r_squared` those of
    whole responses, of which each has its counts of forwards and its time.
    """

    draft_seconds: float
    target_seconds: float
    verified_seconds: float = 0.0
    r_squared: float | None = None
    round_r_squared: float | None = None
    num_rounds: int | None = None

    @property
    def ratio(self) -> float:
        """How many draft forwards one target forward costs."""
        return self.target_seconds / self.draft_seconds if self.draft_seconds else float("inf")

    @classmethod
    def at_ratio(cls, ratio: float) -> "Costs":
        """Return costs in units of a target forward, so that a throughput is a speed-up over the target alone."""
        return cls(draft_seconds=1 / ratio, target_seconds=1.0)

    def seconds(self, draft_calls, target_calls, drafted):
        """Return the seconds of so many draft and target forwards and drafted tokens, numbers or arrays."""
        return self.draft_seconds * draft_calls + self.target_seconds * target_calls + self.verified_seconds * drafted


@dataclass(frozen=True)
class RoundTimes:
    """What rounds of live decoding did and how long it took: arrays (R,)."""

    draft_calls: np.ndarray
    drafted: np.ndarray
    draft_seconds: np.ndarray
    target_seconds: np.ndarray  # verification and what follows it
    group: np.ndarray  # which response, by which rule, a round is of


def fit_costs(rounds: RoundTimes) -> Costs:
    """Fit the costs by least squares over rounds: drafting takes `t_d` per forward, verification `t_t + g K` for K drafted tokens.

    Raises:
        UserError: fewer than three rounds, or rounds of one length only, from which the costs cannot be told apart.
    """
    if len(rounds.drafted) < 3 or len(np.unique(rounds.drafted)) < 2:
        raise UserError(
            "the costs of draft and target cannot be told apart from these runs; evaluate at least two draft lengths."
        )
    calls, drafted = rounds.draft_calls.astype(float), rounds.drafted.astype(float)
    draft_seconds = float(calls @ rounds.draft_seconds / max(calls @ calls, 1.0))  # 0 where no draft is run
    inputs = np.stack([np.ones_like(drafted), drafted], axis=1)
    (target_seconds, verified_seconds), *_ = np.linalg.lstsq(inputs, rounds.target_seconds, rcond=None)
    if verified_seconds < 0:  # a machine that was busy with something else
        target_seconds, verified_seconds = rounds.target_seconds.mean(), 0.0
    costs = Costs(draft_seconds, float(target_seconds), float(verified_seconds))
    total, expected = rounds.draft_seconds + rounds.target_seconds, costs.seconds(calls, 1, drafted)
    sums = (np.bincount(rounds.group, weights=seconds) for seconds in (total, expected))
    return replace(costs, r_squared=_r_squared(*sums), round_r_squared=_r_squared(total, expected), num_rounds=len(total))


def own_costs(costs: Costs, rounds: RoundTimes) -> Costs:
    """Return `costs` with the mean times of one rule's rounds: what a rule computes itself, in a draft step or between rounds, is its own.

    What verification costs more per drafted token stays, for rounds of one length do not tell.
    """
    draft_seconds = rounds.draft_seconds.sum() / max(rounds.draft_calls.sum(), 1)
    target_seconds = (rounds.target_seconds - costs.verified_seconds * rounds.drafted).mean()
    return Costs(float(draft_seconds), float(target_seconds), costs.verified_seconds)


def _r_squared(found: np.ndarray, expected: np.ndarray) -> float | None:
    """Return the share of the variance that is explained; None where there is none."""
    spread = found - found.mean()
    return float(1 - ((found - expected) ** 2).sum() / (spread @ spread)) if spread.any() else None
