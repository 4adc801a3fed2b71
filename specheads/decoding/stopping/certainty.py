"""Rules that look at one token's law: how sure the draft is of the token it just wrote."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.decoding.stopping.rule import (
    MAX_TOKENS,
    Rule,
    check_count,
    check_not_negative,
    check_positive,
    check_probability,
    filled,
    graded,
    write_at,
)
from specheads.errors import UserError

MEMORY = 256  # pairs that a threshold is chosen from, the most recent ones; few prompts have more
FEWEST = 6  # pairs before a threshold is chosen


class CertaintyState(NamedTuple):
    num_drafted: Tensor  # (B,) long, in this round so far
    threshold: Tensor  # (B,) float64
    max_tokens: Tensor  # (B,) long
    own: Any = ()  # more of a rule's numbers, and what it remembers, tensors (B, ...)


class CertaintyRule(Rule):
    """What these rules share: a threshold, a maximum, and no memory of the tokens before."""

    def __init__(self, threshold: float, max_tokens: int) -> None:
        check_count("max_tokens", max_tokens, least=1)
        self.threshold, self.max_tokens = threshold, max_tokens

    def init(self, batch: int, device: torch.device) -> CertaintyState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return CertaintyState(zeros, filled(batch, self.threshold, device), zeros + self.max_tokens, self.memory(batch, device))

    def doubts(self, state: CertaintyState, features: Mapping[str, Tensor]) -> Tensor:
        """Return whether the draft is too unsure to go on, (B,) bool."""
        raise NotImplementedError

    def step(self, state: CertaintyState, features: Mapping[str, Tensor]) -> tuple[CertaintyState, Tensor]:
        num_drafted = state.num_drafted + 1
        stop = self.doubts(state, features) | (num_drafted >= state.max_tokens)
        return state._replace(num_drafted=num_drafted, own=self.note(state, features)), stop


class MaxProbability(CertaintyRule):
    """Stop at the first token of whose law no probability reaches `threshold` (BiLD's fallback, Kim et al. 2023, section 3.2)."""

    needs = frozenset({"max_prob"})
    compile_key = "max_probability"

    def __init__(self, threshold: float = 0.9, max_tokens: int = 10) -> None:
        check_probability("threshold", threshold, "a probability of the draft's, for example 0.9")
        super().__init__(threshold, max_tokens)

    def doubts(self, state: CertaintyState, features: Mapping[str, Tensor]) -> Tensor:
        return features["max_prob"] < state.threshold


class Pairs(NamedTuple):
    drafted: Tensor  # (B, max_tokens) float64, the draft's probabilities of this round's tokens
    probs: Tensor  # (B, MEMORY) float64, those of judged tokens, the newest last
    accepted: Tensor  # (B, MEMORY) long, 1 or 0, and -1 where there is no pair yet


class Confidence(CertaintyRule):
    """Stop at the first token that the draft gave a probability below `threshold`, which follows what was accepted so far.

    After each round the threshold becomes the one that tells accepted from rejected tokens of this prompt at the least cost
    (false positive rate + 3 x false negative rate), once there are six judged tokens and one of either kind; of equal costs the
    largest threshold. Only the last MEMORY judged tokens count.

    Args:
        threshold: in [0, 1], at the start of a prompt.
        retune: whether it changes.
        max_tokens: tokens per round at most.

    Source: `assistant_confidence_threshold` of assisted generation in transformers, which needs scikit-learn to retune.
    """

    needs = frozenset({"draft_prob"})

    def __init__(self, threshold: float = 0.4, retune: bool = True, max_tokens: int = MAX_TOKENS) -> None:
        check_probability("threshold", threshold, "a probability of the draft's, for example 0.4")
        if not isinstance(retune, bool):
            raise UserError(f"retune={retune} is neither true nor false.")
        super().__init__(threshold, max_tokens)
        self.retune = retune
        self.compile_key = ("confidence", max_tokens)  # the size of a buffer

    def memory(self, batch: int, device: torch.device) -> Pairs:
        drafted = torch.zeros(batch, self.max_tokens, dtype=torch.float64, device=device)
        probs = torch.zeros(batch, MEMORY, dtype=torch.float64, device=device)
        return Pairs(drafted, probs, torch.full_like(probs, -1, dtype=torch.long))

    def doubts(self, state: CertaintyState, features: Mapping[str, Tensor]) -> Tensor:
        return features["draft_prob"] < state.threshold

    def note(self, state: CertaintyState, features: Mapping[str, Tensor]) -> Pairs:
        return state.own._replace(drafted=write_at(state.own.drafted, state.num_drafted, features["draft_prob"]))

    def learn(self, state: CertaintyState, num_drafted: Tensor, num_accepted: Tensor) -> CertaintyState:
        if not self.retune:
            return state
        own = state.own
        outcomes, _, num_judged = graded(self.max_tokens, num_drafted, num_accepted)
        # The round's judged tokens move in at the end, and as many of the oldest out at the front.
        kept = torch.arange(MEMORY, device=num_judged.device) + num_judged[:, None]
        probs = torch.cat([own.probs, own.drafted], dim=1).gather(1, kept)
        accepted = torch.cat([own.accepted, outcomes.long()], dim=1).gather(1, kept)
        enough = ((accepted >= 0).sum(dim=1) >= FEWEST) & (accepted == 1).any(dim=1) & (accepted == 0).any(dim=1)
        threshold = torch.where(enough, best_threshold(probs, accepted), state.threshold)
        return state._replace(threshold=threshold, own=own._replace(probs=probs, accepted=accepted))


def best_threshold(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the score (B,) from which on to predict 1 at the least false positive rate + 3 x false negative rate.

    The candidates are the scores, of equal costs the largest wins: the first minimum on a ROC curve from its strict end. Costs are
    compared as whole numbers, times the number of ones and that of zeros. Points that only extend a straight stretch of the curve,
    which scikit-learn drops, change nothing: along it the cost is linear, so its first minimum is at an end. A threshold above
    all scores costs 3, and the lowest score 1.

    Args:
        scores: (B, N).
        labels: (B, N) long, 1 or 0, or -1 where there is none; rows without a one or a zero get a score that means nothing.
    """
    scores = torch.where(labels >= 0, scores, -torch.inf)
    scores, order = scores.sort(dim=1, descending=True)
    labels = labels.gather(1, order)
    hits, misses = (labels == 1).cumsum(dim=1), (labels == 0).cumsum(dim=1)
    cost = misses * hits[:, -1:] + 3 * (hits[:, -1:] - hits) * misses[:, -1:]
    following = torch.cat([scores[:, 1:], torch.full_like(scores[:, :1], -torch.inf)], dim=1)
    cost = torch.where(scores > following, cost, torch.iinfo(cost.dtype).max)  # equal scores fall on one side together
    return scores.gather(1, cost.argmin(dim=1, keepdim=True)).squeeze(1)


class EntropyThreshold(CertaintyRule):
    """Stop at the first token whose law has an entropy with a square root above `threshold`.

    Args:
        threshold: square root of nats.
        max_tokens: tokens per round at most.

    Source: SVIP (Zhang et al. 2024, "Draft Model Knows When to Stop").
    """

    needs = frozenset({"entropy"})
    compile_key = "entropy_threshold"

    def __init__(self, threshold: float = 1.0, max_tokens: int = MAX_TOKENS) -> None:
        check_not_negative("threshold", threshold, "the square root of an entropy in nats, for example 1")
        super().__init__(threshold, max_tokens)

    def doubts(self, state: CertaintyState, features: Mapping[str, Tensor]) -> Tensor:
        return features["entropy"].clamp_min(0).sqrt() > state.threshold  # rounding may leave a sure law's just below 0


class AcceptanceTrend(NamedTuple):
    gamma: Tensor  # (B,) float64
    acceptance: Tensor  # (B,) float64, exponential average of accepted / drafted


class AdaptiveEntropy(CertaintyRule):
    """Stop once `1 - sqrt(gamma entropy)`, a bound on the chance of acceptance, falls below a threshold that is steered.

    After each round the threshold rises where the average acceptance rate is below `target_acceptance`, and falls elsewhere.

    Args:
        gamma: steepness of the bound, per nat.
        target_acceptance: in [0, 1], the acceptance rate to steer to.
        threshold: in [0, 1], at the start of a prompt.
        step: what it would change by per round, were it not smoothed.
        beta_acceptance: in [0, 1], weight of the past in the average acceptance rate, which starts at 0.
        beta_threshold: in [0, 1], weight of the past in the threshold.
        max_tokens: tokens per round at most.

    Source: AdaEDL (Agrawal et al. 2024), with the update of Draft & Verify (Zhang et al. 2023, section 3.3).
    """

    needs = frozenset({"entropy"})
    compile_key = "adaptive_entropy"

    def __init__(
        self,
        gamma: float = 0.2,
        target_acceptance: float = 0.9,
        threshold: float = 0.4,
        step: float = 0.01,
        beta_acceptance: float = 0.5,
        beta_threshold: float = 0.9,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        check_positive("gamma", gamma, "how steeply the bound falls with the entropy, for example 0.2")
        check_probability("target_acceptance", target_acceptance, "the acceptance rate to steer to, for example 0.9")
        check_probability("threshold", threshold, "a bound on the chance of acceptance, for example 0.4")
        check_not_negative("step", step, "a change of the threshold per round, for example 0.01")
        check_probability("beta_acceptance", beta_acceptance, "the weight of the past in the acceptance rate, for example 0.5")
        check_probability("beta_threshold", beta_threshold, "the weight of the past in the threshold, for example 0.9")
        super().__init__(threshold, max_tokens)
        self.gamma, self.target_acceptance, self.change = gamma, target_acceptance, step
        self.beta_acceptance, self.beta_threshold = beta_acceptance, beta_threshold

    def memory(self, batch: int, device: torch.device) -> AcceptanceTrend:
        return AcceptanceTrend(filled(batch, self.gamma, device), filled(batch, 0.0, device))

    def doubts(self, state: CertaintyState, features: Mapping[str, Tensor]) -> Tensor:
        return 1 - (state.own.gamma * features["entropy"].clamp_min(0)).sqrt() < state.threshold

    def learn(self, state: CertaintyState, num_drafted: Tensor, num_accepted: Tensor) -> CertaintyState:
        rate = num_accepted.double() / num_drafted.clamp_min(1)
        acceptance = self.beta_acceptance * state.own.acceptance + (1 - self.beta_acceptance) * rate
        wanted = state.threshold + torch.where(acceptance < self.target_acceptance, 1.0, -1.0).double() * self.change
        threshold = self.beta_threshold * state.threshold + (1 - self.beta_threshold) * wanted
        return state._replace(threshold=threshold, own=state.own._replace(acceptance=acceptance))
