"""The values of a warp, how logits become probabilities; sampling.py computes with them. It imports
no torch, so that settings are checked in a moment.
"""

from dataclasses import dataclass, fields
from typing import Annotated

from specheads.settings import Count, Probability, argument, check_arguments, number

# Of a top_p, and of a temperature above 0: with much smaller ones float32 has infinite logits and
# NaN probabilities
LEAST = 1e-6
_TopP = Annotated[float, number(f"a number from {LEAST:g} to 1", lambda value: LEAST <= value <= 1)]
_Temperature = Annotated[
    float,
    number(
        f"0 or a number from {LEAST:g} to {1 / LEAST:g}",
        lambda value: value == 0 or LEAST <= value <= 1 / LEAST,
    ),
]


@dataclass(frozen=True)
class WarpValues:
    """Temperature, top-k, top-p and min-p. Raises UserError for values that no warp has."""

    temperature: _Temperature = argument(
        1.0, "the number that divides the logits; 0: greedy, whatever the others are"
    )
    top_k: Count = argument(0, "the number of most likely tokens to keep, for example 50; 0: all")
    top_p: _TopP = argument(
        1.0, "the probability that the most likely tokens to keep must reach together; 1: all"
    )
    min_p: Probability = argument(
        0.0, "the share of the largest probability that tokens to keep must reach; 0: all"
    )

    def __post_init__(self) -> None:
        check_arguments(self)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token always has probability one."""
        return self.temperature == 0

    def values(self) -> dict[str, float]:
        """Return the values by name, as caches and heads have them.

        Min_p only where it is on: it is younger than they are.
        """
        values = {each.name: getattr(self, each.name) for each in fields(WarpValues)}
        return {name: value for name, value in values.items() if name != "min_p" or value}
