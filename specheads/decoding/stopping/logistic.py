"""Rules on survival that need no head: a token's chance of acceptance is a logistic of the draft's certainty."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specheads.decoding.stopping.rule import (
    MAX_TOKENS,
    check_finite,
    check_positive,
    check_probability,
    filled,
    graded,
    write_at,
)
from specheads.decoding.stopping.survival import REJECTION, SurvivalRule, SurvivalState
from specheads.errors import UserError

CERTAIN = 1e-6  # probabilities keep this distance from 0 and 1, so that their logarithms are finite
# What a logistic may look at: the feature, and what becomes of it.
LOGISTIC_INPUTS = {
    "logit_max_prob": ("max_prob", lambda p: p.logit(CERTAIN)),
    "log_draft_prob": ("draft_prob", lambda p: p.clamp(CERTAIN, 1 - CERTAIN).log()),
    "max_prob": ("max_prob", lambda p: p),
    "entropy": ("entropy", lambda nats: nats),
}


def logistic_inputs(names: Sequence[str], features: Mapping[str, Tensor]) -> Tensor:
    """Return what a logistic weighs, (..., len(names)) float64, of features (...); `names` from LOGISTIC_INPUTS, and `bias`."""
    sources = [(name, *LOGISTIC_INPUTS[name]) for name in names if name != "bias"]
    columns = {name: transform(features[source].double()) for name, source, transform in sources}
    columns["bias"] = torch.ones_like(next(iter(columns.values())))
    return torch.stack([columns[name] for name in names], dim=-1)


class LogisticWeights(NamedTuple):
    weights: Tensor  # (B, n) float64, in the order of LOGISTIC_INPUTS, the bias last


class Logistic(SurvivalRule):
    """Stop once the chance that some drafted token is rejected exceeds `threshold`, by a logistic of the draft's certainty.

    Args:
        weights: of names in LOGISTIC_INPUTS, and `bias`; fitted on dev prompts.
        threshold: in [0, 1]; 1 never stops before `max_tokens`.
        min_tokens: tokens per round at least.
        max_tokens: tokens per round at most.

    Source: stopping as in SpecDec++ (Huang et al. 2024, section 3.3), with a calibrated certainty in place of the head.
    """

    def __init__(
        self,
        weights: Mapping[str, float | None] | None = None,
        threshold: float = 0.7,
        min_tokens: int = 1,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        check_probability("threshold", threshold, REJECTION)
        super().__init__(threshold, min_tokens, max_tokens)
        self.weights = checked_weights(weights)
        self.needs = frozenset(LOGISTIC_INPUTS[name][0] for name in self.weights if name != "bias")
        self.program = ("logistic", *self.weights)

    def memory(self, batch: int, device: torch.device) -> LogisticWeights:
        weights = torch.tensor([list(self.weights.values())], dtype=torch.float64, device=device)
        return LogisticWeights(weights.repeat(batch, 1))

    def acceptance(self, state: SurvivalState, features: Mapping[str, Tensor]) -> Tensor:
        return (state.own.weights * logistic_inputs(tuple(self.weights), features)).sum(dim=-1).sigmoid()


def checked_weights(weights: object) -> dict[str, float]:
    """Return a logistic's weights in the order of LOGISTIC_INPUTS; raises UserError for others than numbers of known names."""
    example = "for example {logit_max_prob: 1.0, bias: 0.0}"
    if weights is None or (isinstance(weights, Mapping) and None in weights.values()):
        raise UserError(f"weights={weights}: they are fitted on dev prompts by evaluate.py; run it, or give numbers, {example}.")
    known = (*LOGISTIC_INPUTS, "bias")
    if not isinstance(weights, Mapping) or not set(weights) - {"bias"}:
        raise UserError(f"weights={weights} weigh nothing; give numbers for some of {', '.join(known)}, {example}.")
    if unknown := [name for name in weights if name not in known]:
        raise UserError(f"weights names {unknown[0]!r}; a logistic can weigh {', '.join(known)}.")
    for name, weight in weights.items():
        check_finite(f"weights.{name}", weight, "a weight, for example 1")
    return {name: weights[name] for name in known if name in weights}


class LogisticMemory(NamedTuple):
    weights: Tensor  # (B, 2) float64, slope and intercept
    information: Tensor  # (B, 2, 2) float64
    inputs: Tensor  # (B, max_tokens) float64, logits of the largest probabilities of this round's laws


class OnlineLogistic(SurvivalRule):
    """Stop once the chance that some drafted token is rejected exceeds `threshold`, by a logistic that learns with every round.

    It has a slope and an intercept on the logit of the law's largest probability. After a round they move by an online Newton step
    `A^-1 sum (y - p) x` over the judged tokens (accepted, y = 1, and the first rejected one, y = 0), whose information p (1 - p) x x^T
    is added to A before.

    Args:
        slope, intercept: at the start of a prompt.
        prior: A starts at this times the identity; the larger, the slower they move at first.
        threshold: in [0, 1]; 1 never stops before `max_tokens`.
        min_tokens: tokens per round at least.
        max_tokens: tokens per round at most.

    Source: online Newton step (Hazan et al. 2007) on the logistic loss; vLLM has a two-parameter logistic of this kind.
    """

    needs = frozenset({"max_prob"})

    def __init__(
        self,
        slope: float = 1.0,
        intercept: float = 0.0,
        prior: float = 10.0,
        threshold: float = 0.7,
        min_tokens: int = 1,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        check_finite("slope", slope, "what the logit of a probability is multiplied by, for example 1")
        check_finite("intercept", intercept, "what is added to the logit of a probability, for example 0")
        check_positive("prior", prior, "the weight of slope and intercept as they are at the start, for example 10")
        check_probability("threshold", threshold, REJECTION)
        super().__init__(threshold, min_tokens, max_tokens)
        self.slope, self.intercept, self.prior = slope, intercept, prior
        self.program = ("online_logistic", max_tokens)  # the size of a buffer

    def memory(self, batch: int, device: torch.device) -> LogisticMemory:
        weights = torch.stack([filled(batch, self.slope, device), filled(batch, self.intercept, device)], dim=1)
        information = self.prior * torch.eye(2, dtype=torch.float64, device=device).repeat(batch, 1, 1)
        return LogisticMemory(weights, information, filled(batch * self.max_tokens, 0.0, device).view(batch, -1))

    def acceptance(self, state: SurvivalState, features: Mapping[str, Tensor]) -> Tensor:
        return (state.own.weights * logistic_inputs(("logit_max_prob", "bias"), features)).sum(dim=-1).sigmoid()

    def note(self, state: SurvivalState, features: Mapping[str, Tensor]) -> LogisticMemory:
        logit = logistic_inputs(("logit_max_prob",), features).squeeze(-1)
        return state.own._replace(inputs=write_at(state.own.inputs, state.num_drafted, logit))

    def learn(self, state: SurvivalState, num_drafted: Tensor, num_accepted: Tensor) -> SurvivalState:
        own = state.own
        accepted, judged, _ = graded(self.max_tokens, num_drafted, num_accepted)
        inputs = torch.stack([own.inputs, torch.ones_like(own.inputs)], dim=-1)
        probs = (inputs * own.weights[:, None]).sum(dim=-1).sigmoid()
        outer = inputs[..., :, None] * inputs[..., None, :]
        information = own.information + (outer * (judged * probs * (1 - probs))[..., None, None]).sum(dim=1)
        gradient = (inputs * (judged * (accepted.double() - probs))[..., None]).sum(dim=1)
        weights = own.weights + solved(information, gradient)
        return state._replace(own=own._replace(weights=weights, information=information))


def solved(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return `matrix^-1 vector` (B, 2) for symmetric (B, 2, 2), without the wait for a device that torch.linalg brings."""
    (a, b, _, d), (x, y) = matrix.flatten(1).unbind(dim=1), vector.unbind(dim=1)
    return torch.stack([d * x - b * y, a * y - b * x], dim=1) / (a * d - b * b)[:, None]
