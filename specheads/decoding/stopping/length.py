"""Rules that plan a round's length before it starts, from how many tokens were accepted in earlier rounds."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specheads.decoding.stopping.rule import MAX_TOKENS, StoppingRule, argument
from specheads.errors import UserError, is_count
from specheads.settings import Count, PositiveCount


class _LengthState(NamedTuple):
    """The state of these rules."""

    num_drafted: Tensor  # (B,) long, in this round so far
    num_tokens: Tensor  # (B,) long, to draft


class LengthRule(StoppingRule):
    """The base of these rules: `start` tokens in the first round, `max_tokens` at most in any, and a step that counts."""

    needs = frozenset()
    compile_key: Hashable = "length"
    start: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_count(self.start, least=1) or self.start > self.max_tokens:
            raise UserError(
                f"start={self.start} and max_tokens={self.max_tokens} must be integers with 1 <= start <= max_tokens."
            )

    def start_prompt(self, batch: int, device: torch.device) -> _LengthState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return _LengthState(zeros, zeros + self.start)

    def step(self, state: _LengthState, features: Mapping[str, Tensor]) -> tuple[_LengthState, Tensor]:
        num_drafted = state.num_drafted + 1
        return state._replace(num_drafted=num_drafted), num_drafted >= state.num_tokens


@dataclass(eq=False)
class FixedLength(LengthRule):
    """Draft `num_tokens` tokens in every round."""

    num_tokens: int = argument(5, "the length of every draft", PositiveCount)

    def __post_init__(self) -> None:
        self.start = self.max_tokens = self.num_tokens
        super().__post_init__()


@dataclass(eq=False)
class Heuristic(LengthRule):
    """Draft `increase` tokens more after a round whose tokens were all accepted, and `decrease` fewer after any other.

    Source: the `heuristic` schedule of assisted generation in transformers (5, 2 and 1 there, and no maximum).
    """

    start: int = 5
    increase: int = argument(2, "tokens", Count)
    decrease: int = argument(1, "tokens", Count)
    max_tokens: int = argument(MAX_TOKENS, "the longest draft", PositiveCount)

    def learn(self, state: _LengthState, num_drafted: Tensor, num_accepted: Tensor) -> _LengthState:
        change = torch.where(num_accepted == num_drafted, self.increase, -self.decrease)
        return state._replace(num_tokens=(state.num_tokens + change).clamp(1, self.max_tokens))
