"""The fits that stopping rules use to choose the arguments that their configs leave open."""

from collections.abc import Sequence
from typing import Any, Protocol

from specheads.decoding.step_costs import StepCosts


class Fitting(Protocol):
    """Fits to the recorded drafts of dev prompts. Heads are given as recorded: by their logits, in place of their networks."""

    @property
    def mean_acceptance(self) -> float:
        """The share of proposed tokens that are accepted."""

    def logistic(self, names: Sequence[str]) -> dict[str, float]:
        """Return the weights of a logistic of the draft's confidence; for `names` see `logistic_inputs`."""

    def calibration(self, head: Any) -> dict[str, float]:
        """Return the `slope` and `intercept` that calibrate a head's logits, on top of the head's calibration."""

    def auto_threshold(self, head: Any, max_tokens: int, costs: Any) -> tuple[float, float]:
        """Return the best threshold of a head, and the throughput there in tokens per draft step's time.

        Args:
            costs: those that `StoppingRule.fit` was given, or of `costs_at`.
        """

    def costs_at(self, cost_ratio: float) -> StepCosts:
        """Return the costs at which a forward pass of the target takes `cost_ratio` draft steps."""


def cost_ratio(costs: StepCosts) -> float:
    """Return how many draft steps a forward pass of the target takes."""
    return costs.target_seconds / (costs.draft_seconds + costs.verified_seconds)
