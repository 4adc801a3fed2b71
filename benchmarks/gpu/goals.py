"""The goals on a GPU, each a ratio that one script measures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """A ratio with its limit."""

    text: str
    script: str  # that measures it
    at_least: bool  # or at most
    limit: float

    @property
    def bound(self) -> str:
        """The direction of the limit, in words."""
        return "at least" if self.at_least else "at most"

    def is_met(self, measured: float) -> bool:
        """Return whether a measurement is on the right side of the limit."""
        return measured >= self.limit if self.at_least else measured <= self.limit


GOALS = {
    "target_alone": Goal("the target alone, of the memory's bandwidth (8B, bfloat16)", "round", True, 0.70),
    "verification_of_8": Goal("a verification of 8 tokens, in steps of the target alone", "round", False, 1.05),
    "round": Goal("a round, in its forward passes alone", "round", False, 1.15),
    "twenty_heads": Goal("a training step of 20 heads, in steps of one head", "training", False, 1.25),
    "distillation": Goal("distillation of 1B from 8B, of the peak of bfloat16 operations", "training", True, 0.40),
}
