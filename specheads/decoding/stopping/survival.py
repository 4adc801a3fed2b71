"""Rules on the chance that all drafted tokens survive: each gives a token a chance of acceptance, and the product decides."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.decoding.stopping.rule import (
    MAX_TOKENS,
    Rule,
    check_finite,
    check_positive,
    check_probability,
    filled,
)
from specheads.errors import UserError, is_count
from specheads.features import ROUND_INPUTS
from specheads.heads.calibration import IndexCalibration, calibrated
from specheads.heads.head import AcceptanceHead

REJECTION = "a probability of rejection, for example 0.7"
TYPICAL_LENGTH = 4  # tokens of the drafts that a throughput is guessed from


class SurvivalState(NamedTuple):
    num_drafted: Tensor  # (B,) long, in this round so far
    survival: Tensor  # (B,) float64, estimated chance that every judged token is accepted
    threshold: Tensor  # (B,) float64
    min_tokens: Tensor  # (B,) long
    max_tokens: Tensor  # (B,) long
    own: Any = ()  # more of a rule's numbers, and what it remembers, tensors (B, ...)


class SurvivalRule(Rule):
    """What these rules share: stop once the chance that some drafted token is rejected exceeds `threshold`."""

    def __init__(self, threshold: float, min_tokens: int, max_tokens: int) -> None:
        if not is_count(min_tokens, least=1) or not is_count(max_tokens, least=min_tokens):
            raise UserError(
                f"min_tokens={min_tokens} and max_tokens={max_tokens}: expected counts with 1 <= min_tokens <= max_tokens."
            )
        self.threshold, self.min_tokens, self.max_tokens = threshold, min_tokens, max_tokens

    def init(self, batch: int, device: torch.device) -> SurvivalState:
        zeros, ones = torch.zeros(batch, dtype=torch.long, device=device), filled(batch, 1.0, device)
        bounds = (filled(batch, self.threshold, device), zeros + self.min_tokens, zeros + self.max_tokens)
        return SurvivalState(zeros, ones, *bounds, self.memory(batch, device))

    def acceptance(self, state: SurvivalState, features: Mapping[str, Tensor]) -> Tensor:
        """Return the estimated chance (B,) that the token judged by this step is accepted."""
        raise NotImplementedError

    def judge(self, state: SurvivalState, features: Mapping[str, Tensor]) -> tuple[Any, Tensor]:
        """Return `state.own` with what is to be remembered of this step, and `acceptance`."""
        return state.own, self.acceptance(state, features)

    def step(self, state: SurvivalState, features: Mapping[str, Tensor]) -> tuple[SurvivalState, Tensor]:
        own, accepted = self.judge(state, features)
        survival, num_drafted = state.survival * accepted, state.num_drafted + 1
        stop = (1 - survival > state.threshold) & (num_drafted >= state.min_tokens)
        new = state._replace(num_drafted=num_drafted, survival=survival, own=own)
        return new, stop | (num_drafted >= state.max_tokens)

    def begin(self, state: SurvivalState) -> SurvivalState:
        return super().begin(state)._replace(survival=torch.ones_like(state.survival))


class DraftProduct(SurvivalRule):
    """Stop once the draft's own probability of all that it drafted in this round is below `1 - threshold`.

    Args:
        threshold: in [0, 1]; 1 never stops before `max_tokens`.
        min_tokens: tokens per round at least.
        max_tokens: tokens per round at most.

    Source: the cumulative confidence of EAGLE-2's draft trees (Li et al. 2024), on a chain.
    """

    needs = frozenset({"draft_prob"})
    compile_key = "draft_product"

    def __init__(self, threshold: float = 0.7, min_tokens: int = 1, max_tokens: int = MAX_TOKENS) -> None:
        check_probability("threshold", threshold, REJECTION)
        super().__init__(threshold, min_tokens, max_tokens)

    def acceptance(self, state: SurvivalState, features: Mapping[str, Tensor]) -> Tensor:
        return features["draft_prob"]


class HeadMemory(NamedTuple):
    slope: Tensor  # (B, indices), by the judged token's index in the round; float32, as heads compute
    intercept: Tensor  # (B, indices)
    target_hidden: Tensor  # (B, size) that the target's last token was decided from, size 0 if the head does not read it


class HeadRule(SurvivalRule):
    """What rules share that ask a head: its logit of a token, calibrated by the token's index in the round, is the chance of acceptance.

    The calibration is part of the state, so that compiled code serves every head of one shape.
    """

    def __init__(self, head: AcceptanceHead, threshold: float, min_tokens: int, max_tokens: int) -> None:
        super().__init__(threshold, min_tokens, max_tokens)
        inputs = frozenset(head.config.inputs)
        self.head, self.needs, self.verified = head, inputs - set(ROUND_INPUTS), inputs & {"target_hidden"}

    def memory(self, batch: int, device: torch.device) -> Any:
        """Return a state's `own`, which has what HeadMemory has."""
        size = self.head.config.target_size if self.verified else 0
        target_hidden = torch.zeros(batch, size, dtype=self.head.readout.weight.dtype if size else None, device=device)
        return HeadMemory(*IndexCalibration.from_dict(self.head.config.calibration).rows(batch, device), target_hidden)

    def see(self, state: SurvivalState, verified: Mapping[str, Tensor]) -> SurvivalState:
        seen = {name: verified[name].to(getattr(state.own, name).dtype) for name in self.verified}
        return state._replace(own=state.own._replace(**seen))

    def index(self, state: SurvivalState) -> Tensor:
        """Return the index (B,) in its round of the token that the head speaks of; -1 where there is none yet."""
        return state.num_drafted - 1 if predicts_input(self.head) else state.num_drafted

    def head_logit(self, state: SurvivalState, features: Mapping[str, Tensor]) -> Tensor:
        """Return the head's calibrated logit (B,)."""
        index = self.index(state)
        known = {**features, "index": index.clamp_min(0), "target_hidden": state.own.target_hidden}
        return calibrated(self.head(known), index, state.own.slope, state.own.intercept)

    def acceptance(self, state: SurvivalState, features: Mapping[str, Tensor]) -> Tensor:
        return torch.where(self.index(state) >= 0, self.head_logit(state, features).sigmoid(), 1.0)


class HeadThreshold(HeadRule):
    """Stop once the chance that some drafted token is rejected exceeds `threshold` (SpecDec++, section 3.3).

    A head that judges the `input_token` speaks of y_{j-1} at step j, so y_j is submitted unjudged and the first step judges
    nothing; one that judges the `next_token` speaks of y_j itself.

    Args:
        head: an AcceptanceHead, for the draft in use.
        threshold: in [0, 1]; 1 never stops before `max_tokens`; `auto`: the one that the head's own config recommends.
        min_tokens: default 2 for `input_token` heads, 1 for `next_token` heads.
        max_tokens: tokens per round at most.
    """

    def __init__(
        self,
        head: AcceptanceHead,
        threshold: float | str = 0.7,
        min_tokens: int | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        threshold = recommended_threshold(head) if threshold == "auto" else threshold
        check_probability("threshold", threshold, f"{REJECTION}, or auto")
        super().__init__(head, threshold, (2 if predicts_input(head) else 1) if min_tokens is None else min_tokens, max_tokens)
        self.compile_key = ("head_threshold", head)


def predicts_input(head: AcceptanceHead) -> bool:
    return head.config.predicts == "input_token"


def recommended_threshold(head: AcceptanceHead) -> float:
    """Return the threshold in a head's config; raises UserError if nothing has stored one."""
    recommended = getattr(head.config, "recommended", None) or {}
    if "threshold" not in recommended:
        raise UserError(
            "threshold=auto, but the head recommends none; run python evaluate.py head=<folder>, which stores it, or give a number, "
            "for example 0.7."
        )
    return recommended["threshold"]


class Throughput(NamedTuple):
    slope: Tensor  # (B, indices) float64, of the head's calibration and the rule's own after it
    intercept: Tensor  # (B, indices) float64
    target_hidden: Tensor  # (B, size), as in HeadMemory
    tokens: Tensor  # (B,) float64, emitted in this prompt, and the prior's
    cost: Tensor  # (B,) float64, draft forwards' time that they took


class ExpectedThroughput(HeadRule):
    """Stop once a further draft forward is expected to yield fewer tokens than its time yields on average.

    Going on pays while `survival m >= lambda` (a renewal-reward argument): survival is the head's chance that all judged tokens are
    accepted, `m` that of what a further forward adds, and lambda the tokens per draft forward's time, over this prompt so far.

    Args:
        head: an AcceptanceHead, for the draft in use.
        cost_ratio: seconds of a target forward over those of a draft forward.
        throughput: tokens per draft forward's time, expected before a prompt starts; default that of drafts of four tokens, each
            accepted with `mean_acceptance`.
        mean_acceptance: in (0, 1], of a token that is not judged yet; one is on its way with `next_token` heads (m is its
            acceptance), two with `input_token` heads (m is the square).
        slope, intercept: calibrate the head's logits, as slope x logit + intercept, on top of the head's own calibration.
        prior_rounds: rounds that the expectation counts for; above 0.
        max_tokens: tokens per round at most.

    Source: the optimal stopping problem of SpecDec++ (Huang et al. 2024, section 3.1), with its cost per token in renewal-reward form.
    """

    def __init__(
        self,
        head: AcceptanceHead,
        cost_ratio: float = 10.0,
        throughput: float | None = None,
        mean_acceptance: float = 0.7,
        slope: float = 1.0,
        intercept: float = 0.0,
        prior_rounds: float = 8,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        check_positive("cost_ratio", cost_ratio, "the time of a target forward over that of a draft forward, for example 10")
        for check in (check_positive, check_probability):
            check("mean_acceptance", mean_acceptance, "an acceptance probability above 0, for example 0.7")
        check_finite("slope", slope, "what the head's logit is multiplied by, for example 1")
        check_finite("intercept", intercept, "what is added to the head's logit, for example 0")
        check_positive("prior_rounds", prior_rounds, "how many rounds the expected throughput counts for, for example 8")
        self.prior_cost = TYPICAL_LENGTH + cost_ratio  # of a round
        if throughput is None:
            throughput = sum(mean_acceptance**n for n in range(TYPICAL_LENGTH + 1)) / self.prior_cost
        check_positive("throughput", throughput, "tokens per time of a draft forward, for example 0.2; null stands for a guess")
        self.worth = mean_acceptance**2 if predicts_input(head) else mean_acceptance
        super().__init__(head, 1 - throughput / self.worth, 1, max_tokens)
        self.compile_key = ("expected_throughput", head)
        self.cost_ratio, self.throughput, self.mean_acceptance = cost_ratio, throughput, mean_acceptance
        self.slope, self.intercept, self.prior_rounds = slope, intercept, prior_rounds

    def memory(self, batch: int, device: torch.device) -> Throughput:
        cost = self.prior_rounds * self.prior_cost
        slope, shift = (filled(batch, value, device)[:, None] for value in (self.slope, self.intercept))
        head, tokens = super().memory(batch, device), self.throughput * cost
        numbers = slope * head.slope, slope * head.intercept + shift, head.target_hidden
        return Throughput(*numbers, filled(batch, tokens, device), filled(batch, cost, device))

    def learn(self, state: SurvivalState, num_drafted: Tensor, num_accepted: Tensor) -> SurvivalState:
        tokens, cost = state.own.tokens + num_accepted + 1, state.own.cost + num_drafted + self.cost_ratio
        # survival m < lambda, in the form that all these rules have
        threshold = 1 - tokens / cost / self.worth
        return state._replace(threshold=threshold, own=state.own._replace(tokens=tokens, cost=cost))
