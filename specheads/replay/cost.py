"""The cost model of speculative decoding (SpecDec++, section 2): seconds from counts of forwards."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specheads.decoding.records import DecodeStats
from specheads.errors import UserError


@dataclass(frozen=True)
class Costs:
    """Seconds of one draft and of one target forward; `r_squared` says how well they explain the times they were fitted to."""

    draft_seconds: float
    target_seconds: float
    r_squared: float | None = None

    @property
    def ratio(self) -> float:
        """How many draft forwards one target forward costs."""
        return self.target_seconds / self.draft_seconds

    @classmethod
    def at_ratio(cls, ratio: float) -> "Costs":
        """Return costs in units of a target forward, so that a throughput is a speed-up over the target alone."""
        return cls(draft_seconds=1 / ratio, target_seconds=1.0)


def fit_costs(parts: Sequence[DecodeStats]) -> Costs:
    """Fit `T = N_draft t_d + N_target t_t` by least squares over recorded generations, prompts not counted.

    Raises:
        UserError: fewer than three generations, or counts in fixed proportion, from which two costs cannot be told apart.
    """
    counts = np.array([[part.num_draft_calls, part.num_target_calls] for part in parts], dtype=float)
    seconds = np.array([part.seconds - part.prefill_seconds for part in parts])
    if len(parts) < 3 or np.linalg.matrix_rank(counts) < 2:
        raise UserError(
            "the costs of draft and target cannot be told apart from these runs; evaluate at least two draft lengths."
        )
    solution, *_ = np.linalg.lstsq(counts, seconds, rcond=None)
    residual, spread = seconds - counts @ solution, seconds - seconds.mean()
    return Costs(*solution.tolist(), r_squared=float(1 - residual @ residual / (spread @ spread)))


def throughput(draft_rate, verification_rate, costs: Costs):
    """Return the predicted tokens per second of a rule, numbers or arrays; see Costs for the units.

    Args:
        draft_rate, verification_rate: draft and target forwards per emitted token.
    """
    return 1 / (costs.draft_seconds * draft_rate + costs.target_seconds * verification_rate)
