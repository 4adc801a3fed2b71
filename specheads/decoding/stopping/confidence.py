"""Rules that remember only a draft's length: one that fixes it, and rules that stop where the draft is unsure of a token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specheads.decoding.stopping.rule import MAX_TOKENS, StoppingRule, argument, filled
from specheads.settings import PositiveCount, Probability


class _LengthState(NamedTuple):
    num_drafted: Tensor  # (B,) long, in this round so far
    num_tokens: Tensor  # (B,) long, to draft


@dataclass(eq=False)
class FixedLength(StoppingRule):
    """Draft `num_tokens` tokens in every round."""

    needs = frozenset()
    compile_key = "length"
    num_tokens: int = argument(5, "the length of every draft", PositiveCount)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_tokens = self.num_tokens

    def start_prompt(self, batch: int, device: torch.device) -> _LengthState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return _LengthState(zeros, zeros + self.num_tokens)

    def step(self, state: _LengthState, features: Mapping[str, Tensor]) -> tuple[_LengthState, Tensor]:
        num_drafted = state.num_drafted + 1
        return state._replace(num_drafted=num_drafted), num_drafted >= state.num_tokens


class _ConfidenceState(NamedTuple):
    num_drafted: Tensor  # (B,) long, in this round so far
    threshold: Tensor  # (B,) float64
    max_tokens: Tensor  # (B,) long


class _ConfidenceRule(StoppingRule):
    """The base of these rules: they stop at the first token with a feature below `threshold`, and after `max_tokens`."""

    feature: str
    threshold: float

    def start_prompt(self, batch: int, device: torch.device) -> _ConfidenceState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return _ConfidenceState(zeros, filled(batch, self.threshold, device), zeros + self.max_tokens)

    def step(self, state: _ConfidenceState, features: Mapping[str, Tensor]) -> tuple[_ConfidenceState, Tensor]:
        num_drafted = state.num_drafted + 1
        stop = (features[self.feature] < state.threshold) | (num_drafted >= state.max_tokens)
        return state._replace(num_drafted=num_drafted), stop


@dataclass(eq=False)
class MaxProbability(_ConfidenceRule):
    """Stop at the first token whose distribution has no probability of at least `threshold` (BiLD, Kim et al. 2023)."""

    feature = compile_key = "max_prob"
    needs = frozenset({"max_prob"})
    threshold: float = argument(0.9, "a probability under the draft, for example 0.9", Probability)
    max_tokens: int = argument(10, "the longest draft", PositiveCount)


@dataclass(eq=False)
class Confidence(_ConfidenceRule):
    """Stop at the first token that the draft gave a probability below `threshold`.

    Source: `assistant_confidence_threshold` of assisted generation in transformers, as it is before it is retuned.
    """

    feature = compile_key = "draft_prob"
    needs = frozenset({"draft_prob"})
    threshold: float = argument(0.4, "a probability under the draft, for example 0.4", Probability)
    max_tokens: int = argument(MAX_TOKENS, "the longest draft", PositiveCount)
