"""Rules that look at one drafted token at a time: they stop where the draft is unsure of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.decoding.stopping.rule import MAX_TOKENS, StoppingRule, argument, filled, outcomes, write_at
from specheads.settings import Flag, PositiveCount, Probability

NUM_REMEMBERED = 256  # outcomes that a threshold is chosen from, the most recent ones; few prompts have more
FEWEST_OUTCOMES = 6  # before a threshold is chosen


class _ConfidenceState(NamedTuple):
    num_drafted: Tensor  # (B,) long, in this round so far
    threshold: Tensor  # (B,) float64
    max_tokens: Tensor  # (B,) long
    memory: Any = ()  # a rule's other numbers and what it remembers, tensors (B, ...)


class _ConfidenceRule(StoppingRule):
    """The base of these rules: a threshold, a maximum of tokens per round, and no memory of the tokens before."""

    threshold: float

    def is_unsure(self, state: _ConfidenceState, features: Mapping[str, Tensor]) -> Tensor:
        """Return whether the draft is too unsure of its token to continue, (B,) bool."""
        raise NotImplementedError

    def start_prompt(self, batch: int, device: torch.device) -> _ConfidenceState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        threshold = filled(batch, self.threshold, device)
        return _ConfidenceState(zeros, threshold, zeros + self.max_tokens, self.initial_memory(batch, device))

    def step(self, state: _ConfidenceState, features: Mapping[str, Tensor]) -> tuple[_ConfidenceState, Tensor]:
        num_drafted = state.num_drafted + 1
        stop = self.is_unsure(state, features) | (num_drafted >= state.max_tokens)
        return state._replace(num_drafted=num_drafted), stop


@dataclass(eq=False)
class MaxProbability(_ConfidenceRule):
    """Stop at the first token whose distribution has no probability of at least `threshold` (BiLD, Kim et al. 2023)."""

    needs = frozenset({"max_prob"})
    compile_key = "max_probability"
    threshold: float = argument(0.9, "a probability under the draft, for example 0.9", Probability)
    max_tokens: int = argument(10, "the longest draft", PositiveCount)

    def is_unsure(self, state: _ConfidenceState, features: Mapping[str, Tensor]) -> Tensor:
        return features["max_prob"] < state.threshold


class _Outcomes(NamedTuple):
    drafted: Tensor  # (B, max_tokens) float64, the draft's probabilities of this round's tokens
    probs: Tensor  # (B, NUM_REMEMBERED) float64, those of tokens whose outcome is known, the newest last
    accepted: Tensor  # (B, NUM_REMEMBERED) long, 1 or 0, and -1 where nothing is remembered yet


@dataclass(eq=False)
class Confidence(_ConfidenceRule):
    """Stop at the first token that the draft gave a probability below `threshold`, which adapts to the outcomes so far.

    After each round the threshold becomes the one that separates accepted from rejected tokens of this prompt at the least cost,
    see `best_threshold`, once six outcomes are known and both kinds have occurred. Only the last NUM_REMEMBERED outcomes count.
    Source: `assistant_confidence_threshold` of assisted generation in transformers, which needs scikit-learn to retune.
    """

    needs = frozenset({"draft_prob"})
    threshold: float = argument(0.4, "a probability under the draft, for example 0.4", Probability)  # the threshold at the start
    retune: bool = argument(True, "whether the threshold adapts", Flag)
    max_tokens: int = argument(MAX_TOKENS, "the longest draft", PositiveCount)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compile_key = ("confidence", self.max_tokens)  # the size of a buffer

    def initial_memory(self, batch: int, device: torch.device) -> _Outcomes:
        drafted = torch.zeros(batch, self.max_tokens, dtype=torch.float64, device=device)
        probs = torch.zeros(batch, NUM_REMEMBERED, dtype=torch.float64, device=device)
        return _Outcomes(drafted, probs, torch.full_like(probs, -1, dtype=torch.long))

    def is_unsure(self, state: _ConfidenceState, features: Mapping[str, Tensor]) -> Tensor:
        return features["draft_prob"] < state.threshold

    def step(self, state: _ConfidenceState, features: Mapping[str, Tensor]) -> tuple[_ConfidenceState, Tensor]:
        drafted = write_at(state.memory.drafted, state.num_drafted, features["draft_prob"])
        return super().step(state._replace(memory=state.memory._replace(drafted=drafted)), features)

    def learn(self, state: _ConfidenceState, num_drafted: Tensor, num_accepted: Tensor) -> _ConfidenceState:
        if not self.retune:
            return state
        memory = state.memory
        round_accepted, _, num_decided = outcomes(self.max_tokens, num_drafted, num_accepted)
        # The round's outcomes move in at the end, and as many of the oldest move out at the front.
        kept = torch.arange(NUM_REMEMBERED, device=num_decided.device) + num_decided[:, None]
        probs = torch.cat([memory.probs, memory.drafted], dim=1).gather(1, kept)
        accepted = torch.cat([memory.accepted, round_accepted.long()], dim=1).gather(1, kept)
        enough = ((accepted >= 0).sum(dim=1) >= FEWEST_OUTCOMES) & (accepted == 1).any(dim=1) & (accepted == 0).any(dim=1)
        threshold = torch.where(enough, best_threshold(probs, accepted), state.threshold)
        return state._replace(threshold=threshold, memory=memory._replace(probs=probs, accepted=accepted))


def best_threshold(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the score (B,) from which on to predict 1 at the least false positive rate + 3 x false negative rate.

    The candidates are the `scores` (B, N), of equal costs the largest wins: the first minimum on a ROC curve from its strict end.
    Costs are compared as integers, multiplied by the number of ones and the number of zeros. `labels` (B, N) long are 1 or 0, or
    -1 where there is none; rows without a one or a zero get a score without meaning.
    """
    scores = torch.where(labels >= 0, scores, -torch.inf)
    scores, order = scores.sort(dim=1, descending=True)
    labels = labels.gather(1, order)
    hits, misses = (labels == 1).cumsum(dim=1), (labels == 0).cumsum(dim=1)
    cost = misses * hits[:, -1:] + 3 * (hits[:, -1:] - hits) * misses[:, -1:]
    following = torch.cat([scores[:, 1:], torch.full_like(scores[:, :1], -torch.inf)], dim=1)
    cost = torch.where(scores > following, cost, torch.iinfo(cost.dtype).max)  # equal scores fall on one side together
    return scores.gather(1, cost.argmin(dim=1, keepdim=True)).squeeze(1)
