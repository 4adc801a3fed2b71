"""The base of rules on survival, the probability that all drafted tokens are accepted, and such
rules without and with a head.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.decoding.stopping.rule import (
    MAX_TOKENS,
    Arguments,
    Features,
    Fitting,
    State,
    StoppingRule,
    filled,
)
from specheads.errors import UserError, is_count
from specheads.heads.calibration import IndexCalibration, calibrated
from specheads.heads.head import AcceptanceHead
from specheads.pair.pair import Pair
from specheads.settings import Probability, argument

REJECTION = "a probability of rejection, for example 0.7"


class SurvivalState(NamedTuple):
    """The state of these rules."""

    num_drafted: Tensor  # (B,) long, in this round so far
    # (B,) float64, estimated probability that every token assessed so far is accepted
    survival: Tensor
    threshold: Tensor  # (B,) float64
    min_tokens: Tensor  # (B,) long
    max_tokens: Tensor  # (B,) long
    # (B,) float64, drafted tokens of this prompt that were expected to be accepted; means nothing
    # where rows step on after a stop
    num_expected: Tensor
    memory: State = ()  # a rule's other numbers and what it remembers, tensors (B, ...)


class SurvivalRule(StoppingRule):
    """The base of rules that stop once the probability of a rejection exceeds `threshold`, after
    `min_tokens` at the earliest.
    """

    threshold: float
    min_tokens: int
    # How many drafted tokens the one that a step assesses comes before the one that the step drafts
    lag = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.min_tokens
        most = self.max_tokens
        if not is_count(least, least=1) or not is_count(most, least=least):
            raise UserError(
                f"min_tokens={least} and max_tokens={most} must be integers with 1 <= min_tokens <="
                " max_tokens."
            )

    def initial_memory(self, batch: int, device: torch.device) -> State:
        """Return what a state has in its `memory` at the start of a prompt, tensors (B, ...)."""
        return ()

    def acceptance(self, state: SurvivalState, features: Features) -> Tensor:
        """Return the estimated acceptance probability (B,) of the token that this step assesses."""
        raise NotImplementedError

    def assess(self, state: SurvivalState, features: Features) -> tuple[State, Tensor]:
        """Return the state's `memory` after this step, and `acceptance`."""
        return state.memory, self.acceptance(state, features)

    def start_prompt(self, batch: int, device: torch.device) -> SurvivalState:
        zeros = torch.zeros(batch, dtype=torch.long, device=device)
        return SurvivalState(
            num_drafted=zeros,
            survival=filled(batch, 1.0, device),
            threshold=filled(batch, self.threshold, device),
            min_tokens=zeros + self.min_tokens,
            max_tokens=zeros + self.max_tokens,
            num_expected=filled(batch, 0.0, device),
            memory=self.initial_memory(batch, device),
        )

    def start_round(self, state: SurvivalState) -> SurvivalState:
        return super().start_round(state)._replace(survival=torch.ones_like(state.survival))

    def num_expected(self, state: SurvivalState) -> Tensor | None:
        # A token is accepted if it and all before it are, so the expected number is the sum of
        # their survival.
        return state.num_expected

    def step(self, state: SurvivalState, features: Features) -> tuple[SurvivalState, Tensor]:
        memory, acceptance = self.assess(state, features)
        survival = state.survival * acceptance
        num_drafted = state.num_drafted + 1
        stop = (1 - survival > state.threshold) & (num_drafted >= state.min_tokens)
        num_expected = state.num_expected + survival
        new = state._replace(
            num_drafted=num_drafted, survival=survival, num_expected=num_expected, memory=memory
        )
        return new, stop | (num_drafted >= state.max_tokens)


@dataclass(eq=False)
class DraftProduct(SurvivalRule):
    """Stop once the product of the draft's probabilities in a round is below `1 - threshold`
    (EAGLE-2, Li et al. 2024).
    """

    forgets = True
    needs = frozenset({"draft_prob"})
    compile_key = "draft_product"
    threshold: Probability = argument(0.7, REJECTION)
    min_tokens: int = 1
    max_tokens: int = MAX_TOKENS

    def num_expected(self, state: SurvivalState) -> Tensor | None:
        return None  # the draft's probability of a token is not that of its acceptance

    def acceptance(self, state: SurvivalState, features: Features) -> Tensor:
        return features["draft_prob"]


class _HeadMemory(NamedTuple):
    """The `memory` in the state of a `HeadRule`; another one with these fields may have more."""

    # (B, indices), by the predicted token's index in the round; float32, as heads compute
    slope: Tensor
    intercept: Tensor  # (B, indices)


@dataclass(eq=False)
class HeadRule(SurvivalRule):
    """The base of rules that ask a head: acceptance is the sigmoid of its logit, calibrated by the
    token's index in the round.

    The calibration is part of the state, so that compiled code serves every head of one shape.
    """

    uses_head = True
    head: AcceptanceHead = field(repr=False)  # a head that was trained for the draft in use
    # auto: what the head's config recommends
    threshold: Any = argument(0.7, f"{REJECTION}, or auto", Probability)
    min_tokens: Any = None  # None: 2 for `input_token` heads, 1 for `next_token` heads
    max_tokens: int = MAX_TOKENS

    def __post_init__(self) -> None:
        if not hasattr(self.head, "config"):
            raise UserError(
                f"head={self.head!r} must be a head, for example specheads.load_head(folder)."
            )
        self.lag = int(self.head.config.predicts == "input_token")
        if self.threshold == "auto":
            self.threshold = (getattr(self.head.config, "recommended", None) or {}).get("threshold")
            if self.threshold is None:
                raise UserError(
                    "threshold=auto, but the head recommends none; run specheads evaluate"
                    " head=<folder>, which stores it, or give a number, for example 0.7."
                )
        if self.min_tokens is None:
            self.min_tokens = 1 + self.lag
        super().__post_init__()
        self.needs = frozenset(self.head.config.inputs)

    def bind(self, pair: Pair, device: torch.device) -> None:
        # A head reads one draft's hidden states; those of another draft mean nothing to it.
        self.head.check_fits(pair)
        self.head.to(device)

    def initial_memory(self, batch: int, device: torch.device) -> State:
        fitted = IndexCalibration.from_dict(self.head.config.calibration)
        return _HeadMemory(*fitted.rows(batch, device))

    def num_expected(self, state: SurvivalState) -> Tensor | None:
        # With a lag the last token of a draft has no prediction.
        return None if self.lag else state.num_expected

    def head_logit(self, state: SurvivalState, features: Features) -> Tensor:
        """Return the head's calibrated logit (B,)."""
        return calibrated(
            self.head(features),
            state.num_drafted - self.lag,
            state.memory.slope,
            state.memory.intercept,
        )

    def acceptance(self, state: SurvivalState, features: Features) -> Tensor:
        predicted = self.head_logit(state, features).sigmoid()
        return torch.where(state.num_drafted >= self.lag, predicted, 1.0)


class HeadThreshold(HeadRule):
    """Stop once the probability that some drafted token is rejected exceeds `threshold` (SpecDec++,
    section 3.2).

    A head that predicts the `input_token` speaks of y_{j-1} at step j: y_j is submitted without a
    prediction, and the first step predicts nothing. One that predicts the `next_token` speaks of
    y_j itself.
    """

    forgets = True
    fitted_to_costs = frozenset({"threshold"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compile_key = ("head_threshold", self.head)

    @classmethod
    def open_parameters(cls, arguments: Arguments) -> frozenset[str]:
        return frozenset({"threshold"} if arguments.get("threshold") == "auto" else ())

    @classmethod
    def fit(cls, arguments: Arguments, fitting: Fitting) -> dict[str, Any]:
        fitted = dict(arguments)
        if "threshold" in cls.open_parameters(arguments):
            fitted["threshold"] = fitting.auto_threshold(fitted.get("max_tokens", MAX_TOKENS))
        return fitted
