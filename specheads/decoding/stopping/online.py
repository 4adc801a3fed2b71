"""Rules on survival that learn within a prompt: a token's chance of acceptance is a logistic that moves with every verification.

What verification said of the tokens of a round is known before the next round begins, and costs nothing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.decoding.stopping.logistic import logistic_inputs
from specheads.decoding.stopping.rule import (
    MAX_TOKENS,
    check_finite,
    check_positive,
    check_probability,
    filled,
    graded,
    write_at,
)
from specheads.decoding.stopping.survival import REJECTION, HeadThreshold, SurvivalRule, SurvivalState, predicts_input
from specheads.heads.head import AcceptanceHead


class OnlineMemory(NamedTuple):
    weights: Tensor  # (B, n) float64, of the inputs
    information: Tensor  # (B, n, n) float64
    inputs: Tensor  # (B, max_tokens, n) float64, by the judged token's index in this round


class OnlineNewton:
    """How these rules learn. A logistic's weights move after a round by an online Newton step `A^-1 sum (y - p) x` over the judged
    tokens (accepted, y = 1, and the first rejected one, y = 0), whose information p (1 - p) x x^T is added to A before.

    Source: online Newton step (Hazan et al. 2007) on the logistic loss.
    """

    max_tokens: int
    lag = 0  # drafted tokens that a step's judgement stays behind

    def look(self, state: SurvivalState, features: Mapping[str, Tensor]) -> Tensor:
        """Return what the logistic weighs, (B, n) float64, of the token that this step judges."""
        raise NotImplementedError

    def at_start(self, weights: list[float], prior: float, batch: int, device: torch.device) -> OnlineMemory:
        """Return the memory at the start of a prompt, where A is `prior` times the identity."""
        size = len(weights)
        information = prior * torch.eye(size, dtype=torch.float64, device=device).repeat(batch, 1, 1)
        inputs = filled(batch * self.max_tokens * size, 0.0, device).view(batch, self.max_tokens, size)
        return OnlineMemory(torch.stack([filled(batch, w, device) for w in weights], dim=1), information, inputs)

    def judge(self, state: SurvivalState, features: Mapping[str, Tensor]) -> tuple[Any, Tensor]:
        inputs, index = self.look(state, features), state.num_drafted - self.lag
        accepted = (state.own.weights * inputs).sum(dim=-1).sigmoid()
        return state.own._replace(inputs=write_at(state.own.inputs, index, inputs)), torch.where(index >= 0, accepted, 1.0)

    def learn(self, state: SurvivalState, num_drafted: Tensor, num_accepted: Tensor) -> SurvivalState:
        own, inputs = state.own, state.own.inputs
        accepted, judged, _ = graded(self.max_tokens, num_drafted - self.lag, num_accepted)
        probs = (inputs * own.weights[:, None]).sum(dim=-1).sigmoid()
        weighed = inputs * (judged * probs * (1 - probs))[..., None]
        information = own.information + weighed.mT @ inputs
        gradient = (inputs * (judged * (accepted.double() - probs))[..., None]).sum(dim=1)
        step = torch.linalg.solve_ex(information, gradient).result  # unlike solve, without a wait for the device
        return state._replace(own=own._replace(weights=own.weights + step, information=information))


class OnlineLogistic(OnlineNewton, SurvivalRule):
    """Stop once the chance that some drafted token is rejected exceeds `threshold`, by a logistic that learns with every round.

    It has a slope and an intercept on the logit of the law's largest probability.

    Args:
        slope, intercept: at the start of a prompt.
        prior: A starts at this times the identity; the larger, the slower they move at first.
        threshold: in [0, 1]; 1 never stops before `max_tokens`.
        min_tokens: tokens per round at least.
        max_tokens: tokens per round at most.

    Source: OnlineNewton's; vLLM has a two-parameter logistic of this kind.
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
        self.compile_key = ("online_logistic", max_tokens)  # the size of a buffer

    def memory(self, batch: int, device: torch.device) -> OnlineMemory:
        return self.at_start([self.slope, self.intercept], self.prior, batch, device)

    def look(self, state: SurvivalState, features: Mapping[str, Tensor]) -> Tensor:
        return logistic_inputs(("logit_max_prob", "bias"), features)


class OnlineHeadMemory(NamedTuple):
    slope: Tensor  # (B, indices), this and the next two as in HeadMemory
    intercept: Tensor
    target_hidden: Tensor
    weights: Tensor  # (B, 3) float64, this and the next two as in OnlineMemory
    information: Tensor
    inputs: Tensor


class OnlineHead(OnlineNewton, HeadThreshold):
    """Stop once the chance that some drafted token is rejected exceeds `threshold`, by a head that learns with every round.

    What the head says is weighed anew as the prompt goes on, beside the logit of the largest probability of the law that the newest
    token was drawn from: a logistic of both, which at the start of a prompt repeats the (calibrated) head. A head that meets text unlike
    what it was trained on is so corrected, and one that is right stays as it is.

    Args:
        head: an AcceptanceHead, for the draft in use.
        threshold: in [0, 1]; 1 never stops before `max_tokens`; `auto`: the one that the head's own config recommends.
        prior: A starts at this times the identity; the larger, the longer the head is believed.
        min_tokens: default 2 for `input_token` heads, 1 for `next_token` heads.
        max_tokens: tokens per round at most.

    Source: SpecDec++ (Huang et al. 2024, section 3.3) for the head and OnlineNewton's for what it learns; together, ours.
    """

    def __init__(
        self,
        head: AcceptanceHead,
        threshold: float | str = 0.7,
        prior: float = 10.0,
        min_tokens: int | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        check_positive("prior", prior, "the weight of the head as it is at the start, for example 10")
        super().__init__(head, threshold, min_tokens, max_tokens)
        self.prior, self.lag, self.needs = prior, int(predicts_input(head)), self.needs | {"max_prob"}
        self.compile_key = ("online_head", head, max_tokens)

    def memory(self, batch: int, device: torch.device) -> OnlineHeadMemory:
        return OnlineHeadMemory(*super().memory(batch, device), *self.at_start([1.0, 0.0, 0.0], self.prior, batch, device))

    def look(self, state: SurvivalState, features: Mapping[str, Tensor]) -> Tensor:
        head = self.head_logit(state, features).double()[:, None]
        return torch.cat([head, logistic_inputs(("logit_max_prob", "bias"), features)], dim=1)
