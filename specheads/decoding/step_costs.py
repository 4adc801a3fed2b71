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
    round_seconds: float = 0.0  # of a round with a draft, besides its steps
    # More of a round after a draft that was accepted whole: its first step reads two tokens
    whole_seconds: float = 0.0
    alone_overhead: float = 0.0  # of a token of the target alone, besides its forward pass
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

    @property
    def alone_seconds(self) -> float:
        """The seconds of a token of the target alone."""
        return self.target_seconds + self.alone_overhead

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

    def seconds(self, draft_calls: np.ndarray, rounds: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Return the seconds (...) of draft steps (...) and of rounds (..., n + 1), counted by
        their drafted tokens 0 to n; `whole` (...) of the drafts were accepted whole.
        """
        each = self.seconds_of_rounds(rounds.shape[-1])
        return self.draft_seconds * draft_calls + rounds @ each + self.whole_seconds * whole

    def seconds_of_rounds(self, count: int) -> np.ndarray:
        """Return the seconds (count,) of rounds that verify 0, 1, ... drafted tokens, besides their
        draft steps.
        """
        return self.round_seconds + self.verify_seconds(np.arange(count))

    def with_rule(self, step_seconds: float) -> "StepCosts":
        """Return the costs with a rule that adds `step_seconds` to each draft step."""
        return replace(self, draft_seconds=self.draft_seconds + step_seconds)
