"""Rules that plan a round's length before it starts, from how many tokens were accepted in earlier rounds."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.decoding.arguments import (
    argument,
    check_count,
    check_not_negative,
    check_positive,
    check_positive_count,
    check_probability,
)
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.stopping.rule import COST_RATIO, MAX_TOKENS, StoppingRule, cost_ratio, filled
from specheads.errors import UserError, is_count

UNTRIED = 1e9  # more than the index of any length


class _LengthState(NamedTuple):
    """The state of these rules."""

    num_drafted: Tensor  # (B,) long, in this round so far
    num_tokens: Tensor  # (B,) long, to draft
    memory: Any = ()  # what a rule remembers of earlier rounds, tensors (B, ...)


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
        return _LengthState(zeros, zeros + self.start, self.initial_memory(batch, device))

    def planned_length(self, state: _LengthState) -> Tensor:
        return state.num_tokens

    def step(self, state: _LengthState, features: Mapping[str, Tensor]) -> tuple[_LengthState, Tensor]:
        num_drafted = state.num_drafted + 1
        return state._replace(num_drafted=num_drafted), num_drafted >= state.num_tokens


@dataclass(eq=False)
class FixedLength(LengthRule):
    """Draft `num_tokens` tokens in every round."""

    num_tokens: int = argument(5, "the length of every draft", check_positive_count)

    def __post_init__(self) -> None:
        self.start = self.max_tokens = self.num_tokens
        super().__post_init__()


@dataclass(eq=False)
class Heuristic(LengthRule):
    """Draft `increase` tokens more after a round whose tokens were all accepted, and `decrease` fewer after any other.

    Source: the `heuristic` schedule of assisted generation in transformers (5, 2 and 1 there, and no maximum).
    """

    start: int = 5
    increase: int = argument(2, "tokens", check_count)
    decrease: int = argument(1, "tokens", check_count)
    max_tokens: int = argument(MAX_TOKENS, "the longest draft", check_positive_count)

    def learn(self, state: _LengthState, num_drafted: Tensor, num_accepted: Tensor) -> _LengthState:
        change = torch.where(num_accepted == num_drafted, self.increase, -self.decrease)
        return state._replace(num_tokens=(state.num_tokens + change).clamp(1, self.max_tokens))


@dataclass(eq=False)
class AcceptedAverage(LengthRule):
    """Draft about as many tokens as were accepted recently, and `extra` more.

    The average, which is the memory, starts at `start - extra`; it is rounded, a half to the even neighbour.

    Source: the adaptive number of speculative steps in SGLang, which averages over a batch; here each prompt has a separate
    average.
    """

    compile_key = "length by an average"
    start: int = 5
    smoothing: float = argument(
        0.2, "the weight of the newest round in the average, for example 0.2", check_positive, check_probability
    )
    extra: int = 1
    max_tokens: int = argument(MAX_TOKENS, "the longest draft", check_positive_count)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_count(self.extra) or self.extra > self.start:
            raise UserError(f"extra={self.extra} and start={self.start} must be integers with 0 <= extra <= start.")

    def initial_memory(self, batch: int, device: torch.device) -> Tensor:
        return filled(batch, self.start - self.extra, device)

    def learn(self, state: _LengthState, num_drafted: Tensor, num_accepted: Tensor) -> _LengthState:
        average = (1 - self.smoothing) * state.memory + self.smoothing * num_accepted.double()
        num_tokens = (average.round().long() + self.extra).clamp(1, self.max_tokens)
        return state._replace(num_tokens=num_tokens, memory=average)


class _Arms(NamedTuple):
    """What `BanditLength` remembers."""

    lengths: Tensor  # (B, A) long, ascending
    arm: Tensor  # (B,) long, which of them is played
    plays: Tensor  # (B, A) long, rounds so far
    emitted: Tensor  # (B, A) long, tokens that came out of them


@dataclass(eq=False)
class BanditLength(LengthRule):
    """Draft the length whose tokens per cost, estimated with optimism over this prompt's rounds, are highest (UCB).

    The index of a length K is `(mean emitted + exploration K sqrt(2 ln(rounds) / plays)) / (K / cost_ratio + 1)`, where a round
    emits its accepted tokens and one more. Before that every length is tried once, from the middle outwards and the shorter
    first, so that a prompt that ends early has spent its rounds on moderate lengths. A round cut short by the length limit or an
    end token counts for the length that was planned.

    Source: UCBSpec in BanditSpec (Hou et al. 2025), with costs in the objective.
    """

    fitted = fitted_to_costs = frozenset({"cost_ratio"})
    arms: Sequence[int] = (1, 2, 3, 4, 6, 8, 12)  # the lengths to choose from
    cost_ratio: float = argument(10.0, COST_RATIO, check_positive)
    exploration: float = argument(0.5, "the weight of the uncertainty about a length, for example 0.5", check_not_negative)

    def __post_init__(self) -> None:
        arms = self.arms
        is_list = isinstance(arms, Sequence) and not isinstance(arms, str)
        if not is_list or not arms or not all(is_count(arm, least=1) for arm in arms) or len(set(arms)) < len(arms):
            raise UserError(f"arms={arms} must be a list of different positive integers, for example [2, 4, 8].")
        self.arms = tuple(sorted(arms))
        self.start, self.max_tokens = self.arms[(len(arms) - 1) // 2], self.arms[-1]
        self.compile_key = ("length by a bandit", len(arms))
        super().__post_init__()

    @classmethod
    def fit(cls, arguments: Mapping[str, Any], fitting: Any, head: Any, costs: StepCosts | None) -> dict[str, Any]:
        fitted = dict(arguments)
        if costs is not None and fitted["cost_ratio"] is None:
            fitted["cost_ratio"] = cost_ratio(costs)
        return fitted

    def initial_memory(self, batch: int, device: torch.device) -> _Arms:
        lengths = torch.tensor([self.arms], device=device).repeat(batch, 1)
        plays = torch.zeros_like(lengths)
        return _Arms(lengths, self._choice(lengths, plays, plays), plays, plays.clone())

    def learn(self, state: _LengthState, num_drafted: Tensor, num_accepted: Tensor) -> _LengthState:
        arms = state.memory
        played = torch.arange(len(self.arms), device=arms.arm.device) == arms.arm[:, None]
        plays, emitted = arms.plays + played, arms.emitted + played * (num_accepted + 1)[:, None]
        arm = self._choice(arms.lengths, plays, emitted)
        num_tokens = arms.lengths.gather(1, arm[:, None]).squeeze(1)
        return state._replace(num_tokens=num_tokens, memory=arms._replace(arm=arm, plays=plays, emitted=emitted))

    def _choice(self, lengths: Tensor, plays: Tensor, emitted: Tensor) -> Tensor:
        """Return the arm (B,) of the highest index, the first of several; an arm that was never played precedes all others."""
        lengths, num_plays = lengths.double(), plays.clamp_min(1).double()
        rounds = plays.sum(dim=1, keepdim=True).clamp_min(1).double()
        optimism = self.exploration * lengths * (2 * rounds.log() / num_plays).sqrt()
        index = (emitted / num_plays + optimism) / (lengths / self.cost_ratio + 1)
        from_middle = (2 * torch.arange(len(self.arms), device=plays.device) - (len(self.arms) - 1)).abs()
        return torch.where(plays == 0, UNTRIED - from_middle.double(), index).argmax(dim=1)
