"""A rule on survival that needs no head: a token's acceptance probability is a logistic of the draft's confidence."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.decoding.arguments import check_finite, check_probability
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.stopping.fitting import Fitting
from specheads.decoding.stopping.rule import MAX_TOKENS
from specheads.decoding.stopping.survival import REJECTION, SurvivalRule, SurvivalState
from specheads.errors import UserError

MARGIN = 1e-6  # probabilities keep this distance from 0 and 1, so that their logarithms are finite
# The inputs of a logistic, by name: the feature, and its transformation with the logarithm of tensors or of arrays.
LOGISTIC_INPUTS: Mapping[str, tuple[str, Callable[[Any, Callable[[Any], Any]], Any]]] = {
    "logit_max_prob": ("max_prob", lambda p, log: log(_inner(p) / (1 - _inner(p)))),
    "log_draft_prob": ("draft_prob", lambda p, log: log(_inner(p))),
    "max_prob": ("max_prob", lambda p, log: p),
    "entropy": ("entropy", lambda nats, log: nats),
}


def _inner(probs: Any) -> Any:
    return probs.clip(MARGIN, 1 - MARGIN)


def logistic_inputs(names: Sequence[str], features: Mapping[str, Tensor]) -> Tensor:
    """Return a logistic's inputs, (..., len(names)) float64, from features (...); `names` from LOGISTIC_INPUTS, and `bias`."""
    sources = [(name, *LOGISTIC_INPUTS[name]) for name in names if name != "bias"]
    columns = {name: transform(features[source].double(), torch.log) for name, source, transform in sources}
    columns["bias"] = torch.ones_like(next(iter(columns.values())))
    return torch.stack([columns[name] for name in names], dim=-1)


class LogisticWeights(NamedTuple):
    """The `memory` in the state of `Logistic`."""

    weights: Tensor  # (B, n) float64, in the order of LOGISTIC_INPUTS, the bias last


class Logistic(SurvivalRule):
    """Stop once the probability that some drafted token is rejected exceeds `threshold`, by a logistic of the draft's confidence.

    Args:
        weights: of names in LOGISTIC_INPUTS, and `bias`; fitted on dev prompts.
        threshold: in [0, 1]; 1 never stops before `max_tokens`.
        min_tokens: tokens per round at least.
        max_tokens: tokens per round at most.

    Source: stopping as in SpecDec++ (Huang et al. 2024, section 3.3), with a calibrated confidence in place of the head.
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
        self.compile_key = ("logistic", *self.weights)

    @classmethod
    def open_parameters(cls, arguments: Mapping[str, Any]) -> frozenset[str]:
        weights = arguments.get("weights")
        return frozenset({"weights"} if isinstance(weights, Mapping) and None in weights.values() else ())

    @classmethod
    def fit(cls, arguments: Mapping[str, Any], fitting: Fitting, head: Any, costs: StepCosts | None) -> dict[str, Any]:
        fitted = dict(arguments)
        if cls.open_parameters(arguments):
            fitted["weights"] = fitting.logistic(list(fitted["weights"]))
        return fitted

    def initial_memory(self, batch: int, device: torch.device) -> LogisticWeights:
        weights = torch.tensor([list(self.weights.values())], dtype=torch.float64, device=device)
        return LogisticWeights(weights.repeat(batch, 1))

    def acceptance(self, state: SurvivalState, features: Mapping[str, Tensor]) -> Tensor:
        return (state.memory.weights * logistic_inputs(tuple(self.weights), features)).sum(dim=-1).sigmoid()


def checked_weights(weights: object) -> dict[str, float]:
    """Return a logistic's weights in the order of LOGISTIC_INPUTS; raises UserError for others than numbers of known names."""
    example = "for example {logit_max_prob: 1.0, bias: 0.0}"
    if weights is None or (isinstance(weights, Mapping) and None in weights.values()):
        raise UserError(
            f"weights={weights} must be numbers; specheads evaluate fits them on dev prompts: run it, or give numbers, {example}."
        )
    known = (*LOGISTIC_INPUTS, "bias")
    if not isinstance(weights, Mapping) or not set(weights) - {"bias"}:
        raise UserError(f"weights={weights} must be a set of keys with numbers, some of {', '.join(known)}, {example}.")
    if unknown := [name for name in weights if name not in known]:
        raise UserError(f"weights.{unknown[0]} is not known; expected one of {', '.join(known)}.")
    for name, weight in weights.items():
        check_finite(f"weights.{name}", weight, "a weight, for example 1")
    return {name: weights[name] for name in known if name in weights}
