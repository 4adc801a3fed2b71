"""A stopping rule of your own: stop after some tokens in a row to which the draft gave less than a
probability.

Decode with it (`python examples/new_stopping_rule.py`), or have `specheads evaluate` tune it and
compare it with the others: see docs/extend.md.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

import specheads


class RowState(NamedTuple):
    """The rule's state, a number for each of B requests that are decoded together."""

    num_drafted: Tensor  # (B,) long, in this round so far
    num_unsure: Tensor  # (B,) long, the last ones in a row that the draft was unsure of


class UnsureTokens(specheads.stopping.StoppingRule):
    """Stop after `patience` tokens in a row with a probability below `threshold` under the
    draft.
    """

    needs = frozenset({"draft_prob"})  # of specheads.heads.features.FEATURES
    forgets = True  # `start_round` leaves nothing of earlier rounds

    def __init__(self, threshold: float = 0.5, patience: int = 2, max_tokens: int = 20) -> None:
        self.threshold = threshold
        self.patience = patience
        self.max_tokens = max_tokens
        # Steps are compiled for these numbers
        self.compile_key = "unsure_tokens", threshold, patience, max_tokens

    def start_prompt(self, batch: int, device: torch.device) -> RowState:
        """Return the state before the first round."""
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return RowState(zeros, zeros)

    def start_round(self, state: RowState) -> RowState:
        """Return the state before the next round."""
        return RowState(*(torch.zeros_like(numbers) for numbers in state))

    def step(self, state: RowState, features: Mapping[str, Tensor]) -> tuple[RowState, Tensor]:
        """Return the state after a drafted token, and whether (B,) drafting stops with it."""
        unsure = features["draft_prob"] < self.threshold
        num_drafted = state.num_drafted + 1
        num_unsure = torch.where(unsure, state.num_unsure + 1, 0)
        return RowState(num_drafted, num_unsure), (num_unsure >= self.patience) | (
            num_drafted >= self.max_tokens
        )


if __name__ == "__main__":
    decoder = specheads.SpeculativeDecoder(
        specheads.load_pair("mini"), stopping=UnsureTokens(), engine="eager"
    )
    print(decoder.generate("def mean(values):\n", max_new_tokens=64).stats)
