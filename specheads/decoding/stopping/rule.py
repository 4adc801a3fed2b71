"""The base of every stopping rule, what rules share, and those rules that remember only how long a
draft is.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.decoding.records import short_repr
from specheads.heads.features import RECORDED
from specheads.pair.pair import Pair
from specheads.settings import PositiveCount, Probability, argument, check_arguments

MAX_TOKENS = 20

State: TypeAlias = Any  # of a rule: a NamedTuple of tensors (B, ...)
Features: TypeAlias = Mapping[str, Tensor]  # (B, ...) by name, see `specheads.decoding.stopping`
Arguments: TypeAlias = Mapping[str, Any]  # of a rule's constructor


class Fitting(Protocol):
    """Fits open parameters of one rule to recorded drafts of dev prompts, at the costs of its
    steps.
    """

    def logistic(self, names: Sequence[str]) -> dict[str, float]:
        """Return the weights of a logistic of the draft's confidence, for `names` of inputs; see
        `logistic_inputs`.
        """
        ...

    def auto_threshold(self, max_tokens: int) -> float:
        """Return the threshold of the rule's head at which one more draft step yields no more than
        the throughput, for drafts of at most `max_tokens`.
        """
        ...


class StoppingRule:
    """Decides after each drafted token whether the draft ends: a state machine on batched tensors.

    The same class runs inside a draft step (B = 1) and over many recorded responses at once (B =
    all). A prompt runs through `start_prompt`, then for each round `start_round`, one `step` per
    drafted token, and `end_round`. A state is a NamedTuple of tensors (B, ...); its field
    `num_drafted` (B,) counts the tokens drafted so far in the round. A rule may be a dataclass. It
    needs `start_prompt` and `step`; everything else has a default.
    """

    needs: frozenset[str] = frozenset(RECORDED)  # the features that `step` reads
    max_tokens: int = MAX_TOKENS  # the longest draft that the rule lets grow
    # Whether steps after `start_round` do not depend on steps before it; replay is then faster
    forgets: ClassVar[bool] = False
    uses_head: ClassVar[bool] = False  # whether its constructor takes a `head`
    # Those open parameters whose values depend on what steps cost.
    fitted_to_costs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Raise UserError for an `argument` that is of another type."""
        check_arguments(self)

    @cached_property
    def compile_key(self) -> Hashable:
        """Rules with equal keys take the same step from the same state, and learn the same."""
        return object()  # equal to no other

    @property
    def learns(self) -> bool:
        """Whether the outcome of a round may change its state."""
        return type(self).learn is not StoppingRule.learn

    @property
    def remembers(self) -> bool:
        """Whether the rounds of a prompt may depend on those before them."""
        return self.learns or not self.forgets

    def bind(self, pair: Pair, device: torch.device) -> None:
        """Prepare for drafting with a pair on the draft's device.

        Raises UserError if the rule does not fit this pair.
        """

    __repr__ = short_repr

    def start_prompt(self, batch: int, device: torch.device) -> State:
        """Return the state (B = `batch`) before the first round."""
        raise NotImplementedError

    def start_round(self, state: State) -> State:
        """Return the state at the start of a round."""
        return state._replace(num_drafted=torch.zeros_like(state.num_drafted))

    def num_expected(self, state: State) -> Tensor | None:
        """Return how many tokens of the prompt's drafts it expected to be accepted, (B,).

        None if it does not predict each.
        """
        return None

    def step(self, state: State, features: Features) -> tuple[State, Tensor]:
        """Take in one drafted token; return the new state and `stop` (B,) bool."""
        raise NotImplementedError

    def end_round(self, state: State, num_drafted: Tensor, num_accepted: Tensor) -> State:
        """Take in a round's outcome, (B,) long each.

        Return the state, unchanged in rows that drafted nothing.
        """
        new = self.learn(state, num_drafted, num_accepted)
        return state if new is state else unless(num_drafted == 0, state, new)

    def learn(self, state: State, num_drafted: Tensor, num_accepted: Tensor) -> State:
        """Return the state after a round's outcome.

        What it returns for rows that drafted nothing is ignored.
        """
        return state

    @classmethod
    def open_parameters(cls, arguments: Arguments) -> frozenset[str]:
        """Return the names of the constructor's arguments that are left to be fitted on dev
        prompts.
        """
        return frozenset()

    @classmethod
    def fit(cls, arguments: Arguments, fitting: Fitting) -> dict[str, Any]:
        """Return the constructor's arguments with the open ones fitted."""
        return dict(arguments)


def unless(rows: Tensor, old: State, new: State) -> State:
    """Return the state `new`, in the types of `old`, but `old` in some `rows` (B,) bool."""

    def chosen(old: Tensor, new: Tensor) -> Tensor:
        if new is old:
            return old
        of_rows = rows.reshape(-1, *[1] * (new.dim() - 1))
        return torch.where(of_rows, old, new.to(old.dtype))

    return tree_map(chosen, old, new)


def filled(batch: int, value: float, device: torch.device) -> Tensor:
    """Return one of a rule's numbers as part of its state, (B,) float64."""
    return torch.full((batch,), value, dtype=torch.float64, device=device)


class CountingState(NamedTuple):
    """The state of these rules."""

    num_drafted: Tensor  # (B,) long, in this round so far
    max_tokens: Tensor  # (B,) long
    threshold: Tensor  # (B,) float64; means nothing without a feature


class _CountingRule(StoppingRule):
    """The base of these rules: they stop after `max_tokens`, and at the first token with a
    `feature` below `threshold`.
    """

    forgets = True
    feature: str | None = None
    threshold: float = 0.0

    def start_prompt(self, batch: int, device: torch.device) -> CountingState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return CountingState(zeros, zeros + self.max_tokens, filled(batch, self.threshold, device))

    def step(self, state: CountingState, features: Features) -> tuple[CountingState, Tensor]:
        state = state._replace(num_drafted=state.num_drafted + 1)
        stop = state.num_drafted >= state.max_tokens
        if self.feature is not None:
            stop = stop | (features[self.feature] < state.threshold)
        return state, stop


@dataclass(eq=False)
class FixedLength(_CountingRule):
    """Draft `num_tokens` tokens in every round."""

    needs = frozenset()
    compile_key = "length"
    num_tokens: PositiveCount = argument(5, "the length of every draft")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_tokens = self.num_tokens


@dataclass(eq=False)
class MaxProbability(_CountingRule):
    """Stop at the first token whose distribution has no probability of at least `threshold` (BiLD,
    Kim et al. 2023).
    """

    feature = compile_key = "max_prob"
    needs = frozenset({"max_prob"})
    threshold: Probability = argument(0.9, "a probability under the draft, for example 0.9")
    max_tokens: PositiveCount = argument(10, "the longest draft")


@dataclass(eq=False)
class Confidence(_CountingRule):
    """Stop at the first token that the draft gave a probability below `threshold`.

    Source: `assistant_confidence_threshold` of assisted generation in transformers, before
    it is retuned.
    """

    feature = compile_key = "draft_prob"
    needs = frozenset({"draft_prob"})
    threshold: Probability = argument(0.4, "a probability under the draft, for example 0.4")
    max_tokens: PositiveCount = argument(MAX_TOKENS, "the longest draft")
