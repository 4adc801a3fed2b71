"""What every stopping rule is, and what rules share that remember earlier tokens or rounds."""

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.errors import UserError, is_count, is_number

MAX_TOKENS = 20


class StoppingRule(Protocol):
    """The same class runs inside a draft step (B = 1) and over many recorded responses at once (B = all)."""

    needs: frozenset[str]
    verified: frozenset[str]  # what it wants to `see` of the last verification, of: target_hidden; a rule may do without both
    max_tokens: int  # the longest draft it lets grow
    compile_key: (
        Hashable  # rules of equal programs take the same step from the same state; what they learn in `observe` may differ
    )

    def init(self, batch: int, device: torch.device) -> Any:
        """Return the state at the start of a prompt."""

    def see(self, state: Any, verified: Mapping[str, Tensor]) -> Any:
        """Take in before a round what is in `verified`, tensors (B, ...); return the state."""

    def planned_length(self, state: Any) -> Tensor | None:
        """Return how many tokens the round will draft, (B,) long, if that does not depend on what is drafted, or else None."""

    def step(self, state: Any, features: Mapping[str, Tensor]) -> tuple[Any, Tensor]:
        """Take in one drafted token; return the new state and `stop` (B,) bool."""

    def observe(self, state: Any, num_drafted: Tensor, num_accepted: Tensor) -> Any:
        """Take in a round's outcome, (B,) long each; return the state for the next round."""


class Rule:
    """What the rules here share. Their states have `num_drafted` (B,), the tokens of this round so far, and `own`, a rule's memory."""

    verified: frozenset[str] = frozenset()

    def memory(self, batch: int, device: torch.device) -> Any:
        """Return a rule's other numbers and what it remembers at the start of a prompt, tensors (B, ...)."""
        return ()

    def planned_length(self, state: Any) -> Tensor | None:
        return None

    def see(self, state: Any, verified: Mapping[str, Tensor]) -> Any:
        return state

    def note(self, state: Any, features: Mapping[str, Tensor]) -> Any:
        """Return `state.own` with what is to be remembered of this token."""
        return state.own

    def learn(self, state: Any, num_drafted: Tensor, num_accepted: Tensor) -> Any:
        """Return the state with what a round taught, in rows that drafted something."""
        return state

    def begin(self, state: Any) -> Any:
        """Return the state at the start of a round."""
        return state._replace(num_drafted=torch.zeros_like(state.num_drafted))

    def observe(self, state: Any, num_drafted: Tensor, num_accepted: Tensor) -> Any:
        return self.begin(where_drafted(num_drafted, self.learn(state, num_drafted, num_accepted), state))


def where_drafted(num_drafted: Tensor, new: Any, old: Any) -> Any:
    """Return the state `new` in rows that drafted something and `old` in the others: an empty round teaches nothing."""
    if new is old:
        return old
    drafted = num_drafted > 0

    def chosen(new: Tensor, old: Tensor) -> Tensor:
        return old if new is old else torch.where(drafted.reshape(-1, *[1] * (new.dim() - 1)), new, old)

    return tree_map(chosen, new, old)


def write_at(buffer: Tensor, place: Tensor, value: Tensor) -> Tensor:
    """Return `buffer` (B, N, ...) with `value` (B, ...) at `place` (B,); before the start and beyond the end nothing is written."""
    here = torch.arange(buffer.shape[1], device=buffer.device) == place[:, None]
    return torch.where(here.reshape(*here.shape, *[1] * (value.dim() - 1)), value.to(buffer.dtype)[:, None], buffer)


def graded(num_places: int, num_drafted: Tensor, num_accepted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which of a round's tokens were accepted, and which were judged at all, (B, num_places) bool, and how many, (B,).

    Verification judges the accepted tokens and the first rejected one; of later ones nobody knows.
    """
    places = torch.arange(num_places, device=num_drafted.device)
    num_judged = torch.minimum(num_accepted + 1, num_drafted)
    return places < num_accepted[:, None], places < num_judged[:, None], num_judged


def filled(batch: int, value: float, device: torch.device) -> Tensor:
    """Return a number of a rule's as part of its state, (B,) float64."""
    return torch.full((batch,), value, dtype=torch.float64, device=device)


def check_probability(name: str, value: object, meaning: str) -> None:
    if not is_number(value) or not 0 <= value <= 1:
        raise UserError(f"{name}={value} is outside [0, 1]; it is {meaning}.")


def check_positive(name: str, value: object, meaning: str) -> None:
    if not is_number(value) or not 0 < value < float("inf"):
        raise UserError(f"{name}={value} is not a number above 0; it is {meaning}.")


def check_not_negative(name: str, value: object, meaning: str) -> None:
    if not is_number(value) or not 0 <= value < float("inf"):
        raise UserError(f"{name}={value} is not a number of at least 0; it is {meaning}.")


def check_finite(name: str, value: object, meaning: str) -> None:
    if not is_number(value) or abs(value) == float("inf"):
        raise UserError(f"{name}={value} is not a number; it is {meaning}.")


def check_count(name: str, value: object, least: int = 0) -> None:
    if not is_count(value, least):
        raise UserError(f"{name}={value} is no count of at least {least}.")
