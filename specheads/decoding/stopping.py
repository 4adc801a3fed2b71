"""When to stop drafting: small state machines on batched tensors that see numbers, never models.

A step comes after each drafted token y_j (j = 1, 2, ...). Its features, all (B, ...):
`token` (B,), `draft_prob` (B,) d(y_j), `max_prob` (B,), `entropy` (B,) nats, `hidden` (B, H) the draft's hidden state that
y_j was sampled from (at the position that consumed y_{j-1}), `embedding` (B, E) the draft's input embedding of y_j.
Probabilities are the draft's plain softmax, whatever the decoder's warping, so that they also say something in greedy mode.

A rule's numbers (a length, a threshold) are part of its state: a step that an engine compiled for one serves them all.
"""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specheads.errors import UserError, is_count, is_number
from specheads.heads.head import AcceptanceHead

MAX_TOKENS = 20


class StoppingRule(Protocol):
    """The same class runs inside a draft step (B = 1) and over many recorded responses at once (B = all)."""

    needs: frozenset[str]
    max_tokens: int  # the longest draft it lets grow
    program: Hashable  # rules of equal programs take the same step from the same state

    def init(self, batch: int, device: torch.device) -> Any:
        """Return the state at the start of a prompt."""

    def planned_length(self, state: Any) -> Tensor | None:
        """Return how many tokens the round will draft, (B,) long, if that does not depend on what is drafted, or else None."""

    def step(self, state: Any, features: Mapping[str, Tensor]) -> tuple[Any, Tensor]:
        """Take in one drafted token; return the new state and `stop` (B,) bool."""

    def observe(self, state: Any, num_drafted: Tensor, num_accepted: Tensor) -> Any:
        """Take in a round's outcome, (B,) long each; return the state for the next round."""


class FixedLength:
    """Draft `num_tokens` tokens in every round."""

    needs = frozenset()
    program = "fixed_length"

    def __init__(self, num_tokens: int = 5) -> None:
        if num_tokens < 1:
            raise UserError(f"num_tokens={num_tokens} drafts nothing; use at least 1.")
        self.num_tokens = self.max_tokens = num_tokens

    def init(self, batch: int, device: torch.device) -> "LengthState":
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return LengthState(zeros, zeros + self.num_tokens)

    def planned_length(self, state: "LengthState") -> Tensor:
        return state.num_tokens

    def step(self, state: "LengthState", features: Mapping[str, Tensor]) -> tuple["LengthState", Tensor]:
        num_drafted = state.num_drafted + 1
        return state._replace(num_drafted=num_drafted), num_drafted >= state.num_tokens

    def observe(self, state: "LengthState", num_drafted: Tensor, num_accepted: Tensor) -> "LengthState":
        return state._replace(num_drafted=torch.zeros_like(state.num_drafted))


class LengthState(NamedTuple):
    num_drafted: Tensor  # (B,) long
    num_tokens: Tensor  # (B,) long, to draft


class HeadState(NamedTuple):
    num_drafted: Tensor  # (B,) long
    survival: Tensor  # (B,) estimated chance that every judged token is accepted
    threshold: Tensor  # (B,)
    min_tokens: Tensor  # (B,) long
    max_tokens: Tensor  # (B,) long


class HeadThreshold:
    """Stop once the chance that some drafted token is rejected exceeds `threshold` (SpecDec++, section 3.3).

    A head that judges the `input_token` speaks of y_{j-1} at step j, so y_j is submitted unjudged and the first step judges
    nothing; one that judges the `next_token` speaks of y_j itself.

    Args:
        head: an AcceptanceHead, for the draft in use.
        threshold: in [0, 1]; 1 never stops before `max_tokens`.
        min_tokens: default 2 for `input_token` heads, 1 for `next_token` heads.
        max_tokens: tokens per round at most.
    """

    def __init__(
        self, head: AcceptanceHead, threshold: float = 0.7, min_tokens: int | None = None, max_tokens: int = MAX_TOKENS
    ) -> None:
        self.judges_input = head.config.judges == "input_token"
        min_tokens = (2 if self.judges_input else 1) if min_tokens is None else min_tokens
        if not 0 <= threshold <= 1:
            raise UserError(f"threshold={threshold} is outside [0, 1]; it is a probability of rejection, for example 0.7.")
        if not 1 <= min_tokens <= max_tokens:
            raise UserError(f"min_tokens={min_tokens} and max_tokens={max_tokens}: expected 1 <= min_tokens <= max_tokens.")
        self.head, self.threshold, self.min_tokens, self.max_tokens = head, threshold, min_tokens, max_tokens
        self.needs = frozenset(head.config.inputs)
        self.program = ("head_threshold", head)

    def init(self, batch: int, device: torch.device) -> HeadState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        threshold = torch.full((batch,), self.threshold, dtype=torch.float64, device=device)
        return HeadState(zeros, torch.ones_like(threshold), threshold, zeros + self.min_tokens, zeros + self.max_tokens)

    def planned_length(self, state: HeadState) -> None:
        return None

    def step(self, state: HeadState, features: Mapping[str, Tensor]) -> tuple[HeadState, Tensor]:
        accepted = torch.sigmoid(self.head(features))
        if self.judges_input:
            accepted = torch.where(state.num_drafted > 0, accepted, 1.0)
        survival, num_drafted = state.survival * accepted, state.num_drafted + 1
        stop = (1 - survival > state.threshold) & (num_drafted >= state.min_tokens)
        return state._replace(num_drafted=num_drafted, survival=survival), stop | (num_drafted >= state.max_tokens)

    def observe(self, state: HeadState, num_drafted: Tensor, num_accepted: Tensor) -> HeadState:
        return state._replace(num_drafted=torch.zeros_like(state.num_drafted), survival=torch.ones_like(state.survival))


class MaxProbabilityState(NamedTuple):
    num_drafted: Tensor  # (B,) long
    threshold: Tensor  # (B,)
    max_tokens: Tensor  # (B,) long


class MaxProbability:
    """Stop at the first token of whose law no probability reaches `threshold` (BiLD's fallback, Kim et al. 2023, section 3.2)."""

    needs = frozenset({"max_prob"})
    program = "max_probability"

    def __init__(self, threshold: float = 0.9, max_tokens: int = 10) -> None:
        if not is_number(threshold) or not 0 <= threshold <= 1:
            raise UserError(f"threshold={threshold} is outside [0, 1]; it is a probability of the draft's, for example 0.9.")
        if not is_count(max_tokens, least=1):
            raise UserError(f"max_tokens={max_tokens} is no count of at least 1.")
        self.threshold, self.max_tokens = threshold, max_tokens

    def init(self, batch: int, device: torch.device) -> MaxProbabilityState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        threshold = torch.full((batch,), self.threshold, dtype=torch.float64, device=device)
        return MaxProbabilityState(zeros, threshold, zeros + self.max_tokens)

    def planned_length(self, state: MaxProbabilityState) -> None:
        return None

    def step(self, state: MaxProbabilityState, features: Mapping[str, Tensor]) -> tuple[MaxProbabilityState, Tensor]:
        num_drafted = state.num_drafted + 1
        stop = (features["max_prob"] < state.threshold) | (num_drafted >= state.max_tokens)
        return state._replace(num_drafted=num_drafted), stop

    def observe(self, state: MaxProbabilityState, num_drafted: Tensor, num_accepted: Tensor) -> MaxProbabilityState:
        return state._replace(num_drafted=torch.zeros_like(state.num_drafted))
