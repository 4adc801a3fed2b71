"""The cost model of speculative decoding (SpecDec++, section 2): seconds from counts of draft
steps, verifications and rounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a draft step, of a verification by its number of drafted tokens, and of a round's
    overhead.
    """

    draft_seconds: float
    target_seconds: float  # one forward pass of the target, which verifies no drafted token
    verified_seconds: float = 0.0  # more for each drafted token
    round_seconds: float = 0.0
    # Measured seconds of verifying 0, 1, 2, ... drafted tokens, where there are any; beyond them
    # each token takes `verified_seconds`.
    verification: tuple[float, ...] = ()
    # By step, the mean of its times over their median: near 1 on a quiet machine; empty where costs
    # are counted.
    spread: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def ratio(self) -> float:
        """How many draft steps one forward pass of the target costs."""
        return self.target_seconds / self.draft_seconds if self.draft_seconds else float("inf")

    @classmethod
    def at_ratio(cls, ratio: float) -> "StepCosts":
        """Return costs in units of a target's forward pass, so that a throughput is a speed-up over
        the target alone.
        """
        return cls(draft_seconds=1 / ratio, target_seconds=1.0)

    def verify_seconds(self, num_drafted: np.ndarray) -> np.ndarray:
        if not self.verification:
            return self.target_seconds + self.verified_seconds * num_drafted
        last = len(self.verification) - 1
        within = np.asarray(self.verification)[np.minimum(num_drafted, last)]
        return within + self.verified_seconds * np.maximum(num_drafted - last, 0)

    def seconds(self, draft_calls: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        """Return the seconds (...) of draft steps (...) and of rounds (..., n + 1), counted by
        their drafted tokens 0 to n.
        """
        each = self.round_seconds + self.verify_seconds(np.arange(rounds.shape[-1]))
        return self.draft_seconds * draft_calls + rounds @ each

    def with_rule(self, rule: "RuleCosts") -> "StepCosts":
        return replace(
            self,
            draft_seconds=self.draft_seconds + rule.step_seconds,
            round_seconds=self.round_seconds + rule.round_seconds,
        )


@dataclass(frozen=True)
class RuleCosts:
    """Seconds that a stopping rule adds: to each draft step, and to each round."""

    step_seconds: float = 0.0
    round_seconds: float = 0.0


def non_decreasing(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the closest values that never fall, by weighted least squares (pooling adjacent
    violators).
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, value_weight in zip(values.tolist(), weight.tolist(), strict=True):
        pools.append((value, value_weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, less, some) = pools.pop()
            (high, more, others) = pools.pop()
            pools.append(((low * less + high * more) / (less + more), less + more, some + others))
    return np.concatenate([np.full(members, mean) for mean, _, members in pools])
