"""Rules on survival by a logistic: of the draft's confidence, fixed or learned within a prompt, and
of a head's logit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.decoding.stopping.rule import (
    MAX_TOKENS,
    Arguments,
    Features,
    Fitting,
    State,
)
from specheads.decoding.stopping.survival import (
    REJECTION,
    HeadThreshold,
    SurvivalRule,
    SurvivalState,
)
from specheads.errors import UserError
from specheads.settings import Number, PositiveNumber, Probability, argument, check

MARGIN = 1e-6  # probabilities keep this distance from 0 and 1, so that their logarithms are finite


def _log(probs: Tensor) -> Tensor:
    return probs.clamp(MARGIN, 1 - MARGIN).log()


def _logit(probs: Tensor) -> Tensor:
    inner = probs.clamp(MARGIN, 1 - MARGIN)
    return (inner / (1 - inner)).log()


# The inputs of a logistic, by name: the feature, and its transformation if there is one.
LOGISTIC_INPUTS: Mapping[str, tuple[str, Callable[[Tensor], Tensor] | None]] = {
    "logit_max_prob": ("max_prob", _logit),
    "log_draft_prob": ("draft_prob", _log),
    "max_prob": ("max_prob", None),
    "entropy": ("entropy", None),
}


def logistic_inputs(names: Sequence[str], features: Features) -> Tensor:
    """Return a logistic's inputs, (..., len(names)) float64, from features (...).

    `names` from LOGISTIC_INPUTS, and `bias`.
    """
    columns = dict[str, Tensor]()
    for name in names:
        if name != "bias":
            feature, transform = LOGISTIC_INPUTS[name]
            value = features[feature].double()
            columns[name] = value if transform is None else transform(value)
    columns["bias"] = torch.ones_like(next(iter(columns.values())))
    return torch.stack([columns[name] for name in names], dim=-1)


@dataclass(eq=False)
class Logistic(SurvivalRule):
    """Stop once the probability that some drafted token is rejected exceeds `threshold`, by a
    logistic of the draft's confidence.

    Its `weights` are of names in LOGISTIC_INPUTS, and `bias`; they are fitted on dev prompts.
    Source: stopping as in SpecDec++ (Huang et al. 2024, section 3.3), with a calibrated confidence
    in place of the head.
    """

    forgets = True
    weights: Any = None
    threshold: Probability = argument(0.7, REJECTION)
    min_tokens: int = 1
    max_tokens: int = MAX_TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights = _checked_weights(self.weights)
        self.needs = frozenset(LOGISTIC_INPUTS[name][0] for name in self.weights if name != "bias")
        self.compile_key = ("logistic", *self.weights)

    @classmethod
    def open_parameters(cls, arguments: Arguments) -> frozenset[str]:
        weights = arguments.get("weights")
        is_open = isinstance(weights, Mapping) and None in weights.values()
        return frozenset({"weights"} if is_open else ())

    @classmethod
    def fit(cls, arguments: Arguments, fitting: Fitting) -> dict[str, Any]:
        fitted = dict(arguments)
        if cls.open_parameters(arguments):
            fitted["weights"] = fitting.logistic(list(fitted["weights"]))
        return fitted

    def initial_memory(self, batch: int, device: torch.device) -> Tensor:
        weights = torch.tensor([list(self.weights.values())], dtype=torch.float64, device=device)
        return weights.repeat(batch, 1)

    def acceptance(self, state: SurvivalState, features: Features) -> Tensor:
        return (state.memory * logistic_inputs(tuple(self.weights), features)).sum(dim=-1).sigmoid()


def _checked_weights(weights: object) -> dict[str, float]:
    """Return a logistic's weights in the order of LOGISTIC_INPUTS.

    Raises UserError for others than numbers of known names.
    """
    known = (*LOGISTIC_INPUTS, "bias")
    given = dict(weights) if isinstance(weights, Mapping) else {}
    if not set(given) - {"bias"} or set(given) - set(known) or None in given.values():
        raise UserError(
            f"weights={weights} must be numbers by name, some of {', '.join(known)}, for example"
            " {logit_max_prob: 1.0, bias: 0.0}; specheads evaluate fits those that are null."
        )
    for name, weight in given.items():
        check(f"weights.{name}", weight, Number, "a weight, for example 1")
    return {name: given[name] for name in known if name in given}


class _OnlineMemory(NamedTuple):
    """What these rules remember; with a head, the fields of a HeadRule's memory, too."""

    weights: Tensor  # (B, n) float64, of the inputs
    information: Tensor  # (B, n, n) float64
    inputs: Tensor  # (B, max_tokens, n) float64, by the assessed token's index in this round
    slope: Tensor | tuple[()] = ()
    intercept: Tensor | tuple[()] = ()


class _OnlineNewton(SurvivalRule):
    """How these rules learn: after a round the weights of a logistic move by an online Newton step
    `A^-1 sum (y - p) x`.

    The sum runs over the tokens whose outcome is known (accepted, y = 1, and the first rejected
    one, y = 0); their information p (1 - p) x x^T is added to A first. Source: online Newton step
    (Hazan et al. 2007) on the logistic loss.
    """

    def inputs(self, state: SurvivalState, features: Features) -> Tensor:
        """Return the inputs of the logistic, (B, n) float64, for the token that this step
        assesses.
        """
        raise NotImplementedError

    def prior_memory(
        self, weights: list[float], prior: float, batch: int, device: torch.device
    ) -> _OnlineMemory:
        """Return the memory at the start of a prompt, where A is `prior` times the identity."""
        size = len(weights)
        start = torch.tensor([weights], dtype=torch.float64, device=device)
        identity = torch.eye(size, dtype=torch.float64, device=device)
        shape = batch, self.max_tokens, size
        return _OnlineMemory(
            weights=start.repeat(batch, 1),
            information=prior * identity.repeat(batch, 1, 1),
            inputs=torch.zeros(shape, dtype=torch.float64, device=device),
        )

    def assess(self, state: SurvivalState, features: Features) -> tuple[State, Tensor]:
        inputs = self.inputs(state, features)
        index = state.num_drafted - self.lag
        acceptance = (state.memory.weights * inputs).sum(dim=-1).sigmoid()
        here = torch.arange(self.max_tokens, device=index.device) == index[:, None]
        kept = torch.where(here[..., None], inputs[:, None], state.memory.inputs)
        return state.memory._replace(inputs=kept), torch.where(index >= 0, acceptance, 1.0)

    def learn(
        self, state: SurvivalState, num_drafted: Tensor, num_accepted: Tensor
    ) -> SurvivalState:
        memory = state.memory
        inputs = state.memory.inputs
        places = torch.arange(self.max_tokens, device=num_drafted.device)
        accepted = places < num_accepted[:, None]
        # Verification decides these and the first rejected token; whether later ones would be
        # accepted is unknown.
        decided = places < torch.minimum(num_accepted + 1, num_drafted - self.lag)[:, None]
        probs = (inputs * memory.weights[:, None]).sum(dim=-1).sigmoid()
        weighted = inputs * (decided * probs * (1 - probs))[..., None]
        products = weighted[..., None] * inputs[..., None, :]
        information = memory.information + products.sum(dim=1)
        gradient = (inputs * (decided * (accepted.double() - probs))[..., None]).sum(dim=1)
        step = _solution(information, gradient)
        learned = memory._replace(weights=memory.weights + step, information=information)
        return state._replace(memory=learned)


def _solution(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return x (B, n) with `matrix` (B, n, n) x = `vector` (B, n), for small positive definite
    matrices.

    Gauss-Jordan elimination, which a compiled step computes without a call of a library.
    """
    size = vector.shape[-1]
    numbers = torch.arange(size, device=vector.device)
    rows = torch.cat([matrix, vector[..., None]], dim=-1)
    for i in range(size):
        pivot = rows[:, i : i + 1] / rows[:, i : i + 1, i : i + 1]
        others = rows - rows[:, :, i : i + 1] * pivot
        rows = torch.where(numbers[:, None] == i, pivot, others)
    return rows[..., -1]


@dataclass(eq=False)
class OnlineLogistic(_OnlineNewton):
    """Stop once a rejection is likely according to a logistic that learns after every round.

    Its inputs are the logit of the distribution's largest probability and a constant. A starts at
    `prior` times the identity: the larger it is, the slower `slope` and `intercept` move at first.
    vLLM has a two-parameter logistic of this kind.
    """

    needs = frozenset({"max_prob"})
    slope: Number = argument(1.0, "the factor of a probability's logit, for example 1")
    intercept: Number = argument(0.0, "the constant added to a probability's logit, for example 0")
    prior: PositiveNumber = argument(
        10.0, "the weight of the slope and intercept at the start of a prompt, for example 10"
    )
    threshold: Probability = argument(0.7, REJECTION)
    min_tokens: int = 1
    max_tokens: int = MAX_TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compile_key = ("online_logistic", self.max_tokens)  # the size of a buffer

    def initial_memory(self, batch: int, device: torch.device) -> _OnlineMemory:
        return self.prior_memory([self.slope, self.intercept], self.prior, batch, device)

    def inputs(self, state: SurvivalState, features: Features) -> Tensor:
        return logistic_inputs(("logit_max_prob", "bias"), features)


@dataclass(eq=False)
class OnlineHead(_OnlineNewton, HeadThreshold):
    """Stop once a rejection is likely according to a head that is corrected after every round.

    A logistic weighs the head's (calibrated) logit and the logit of the largest probability of the
    distribution that the newest token was sampled from. It equals the head at the start of a
    prompt. So a head is corrected on text unlike its training text, and one that is right stays as
    it is. A starts at `prior` times the identity: the larger, the longer the head is trusted.
    """

    prior: PositiveNumber = argument(
        10.0, "the weight of the head at the start of a prompt, for example 10"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.needs |= {"max_prob"}
        self.compile_key = ("online_head", self.head, self.max_tokens)

    def initial_memory(self, batch: int, device: torch.device) -> _OnlineMemory:
        head = super().initial_memory(batch, device)
        logistic = self.prior_memory([1.0, 0.0, 0.0], self.prior, batch, device)
        return logistic._replace(slope=head.slope, intercept=head.intercept)

    def inputs(self, state: SurvivalState, features: Features) -> Tensor:
        head_logit = self.head_logit(state, features).double()[:, None]
        return torch.cat([head_logit, logistic_inputs(("logit_max_prob", "bias"), features)], dim=1)
