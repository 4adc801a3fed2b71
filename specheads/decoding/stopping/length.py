"""The rule that knows a draft's length before it starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specheads.decoding.stopping.rule import StoppingRule, argument
from specheads.settings import PositiveCount


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
