"""Logits -> probabilities -> tokens: the only place in the project where either happens.

Sampling inverts the cumulative distribution at a given uniform number, so a token does not depend
on the rest of its batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from specheads.errors import UserError
from specheads.pair.warp import WarpValues

Row = TypeVar("Row")
Result = TypeVar("Result")


class SoftmaxSums(NamedTuple):
    """Sums over the vocabulary from which the features of a softmax without temperature or cuts are
    computed, (...) each.
    """

    largest: Tensor  # the largest logit
    total: Tensor  # the sum of exp(logit - largest)
    moment: Tensor  # the sum of exp(logit - largest) * (logit - largest)


def softmax_sums(logits: Tensor) -> SoftmaxSums:
    """Return the sums of logits (..., V), float32 or wider, in two passes over them."""
    largest = logits.amax(dim=-1, keepdim=True)
    # A logit of minus infinity counts for nothing: 0 log 0 = 0.
    below = (logits - largest).clamp_min(torch.finfo(logits.dtype).min)
    weights = below.exp()
    return SoftmaxSums(largest.squeeze(-1), weights.sum(dim=-1), (weights * below).sum(dim=-1))


class Sampling:
    """What a warp, and the features of a distribution, are computed with: torch.

    An engine for a device may have other operations of the same results.
    """

    def linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        """Return the output (..., O) of a linear map for `x` (..., I)."""
        output: Tensor = module(x)
        return output

    def most_likely(self, x: Tensor) -> Tensor:
        """Return the index (...) of the largest number of each row of `x` (..., V), the first NaN
        where there is one.
        """
        return x.argmax(dim=-1)

    def kth_largest(self, x: Tensor, k: int) -> Tensor:
        """Return the k-th largest number (..., 1) of each row of `x` (..., V)."""
        return x.topk(k, dim=-1).values[..., -1:]

    def kept_softmax(self, logits: Tensor, least: Tensor) -> Tensor:
        """Return the probabilities (..., V) of the logits (..., V) that are at least `least`
        (..., 1); the others have none.
        """
        return logits.masked_fill(logits < least, -torch.inf).softmax(dim=-1)

    def nucleus(self, probs: Tensor, top_p: float) -> Tensor:
        """Return `probs` (..., V) of the first smallest set of likely tokens whose mass reaches
        `top_p`, renormalised.
        """
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.cumsum(dim=-1) - ordered
        kept = ordered.masked_fill(mass_before >= top_p, 0)
        return torch.zeros_like(probs).scatter_(-1, index, kept / kept.sum(dim=-1, keepdim=True))

    def softmax_sums(self, logits: Tensor) -> SoftmaxSums:
        """Return the sums of logits (..., V), float32 or wider."""
        return softmax_sums(logits)

    def token_at(self, probs: Tensor, uniform: Tensor) -> Tensor:
        """Return the first token ids (...) at which the sum of `probs` (..., V) exceeds `uniform`
        (...) times their total.
        """
        return tokens_at(probs, uniform.unsqueeze(-1)).squeeze(-1)


TORCH = Sampling()
_active: ContextVar[Sampling] = ContextVar("sampling", default=TORCH)


def active() -> Sampling:
    """Return the operations that warps compute with."""
    return _active.get()


@contextmanager
def computing_with(operations: Sampling) -> Iterator[None]:
    """While it is active, this thread's warps compute with other operations than torch's."""
    before = _active.set(operations)
    try:
        yield
    finally:
        _active.reset(before)


def tokens_at(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return token ids (..., Q) of the distributions `probs` (..., V) at Q numbers each, `uniforms`
    (..., Q); see `token_at`.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    # Rounding must not move the point to the total, which only the tokens after the last possible
    # one reach.
    point = torch.minimum(uniforms * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True).clamp_max(probs.shape[-1] - 1)


@dataclass(frozen=True)
class Warp(WarpValues):
    """Temperature, then top-k, then top-p, then min-p (Nguyen et al. 2024), as transformers' logits
    warpers apply them.
    """

    def __call__(self, logits: Tensor) -> Tensor:
        """Return probabilities (..., V), float32 or wider, of logits (..., V) of any float type.

        A NaN makes its row NaN.
        """
        logits = at_least_float32(logits)
        if self.greedy:
            best, zero = greedy_tokens(logits)
            index = torch.arange(logits.shape[-1], device=logits.device)
            is_best = index == best.unsqueeze(-1)
            return torch.where(is_best, 1.0, 0.0).to(logits.dtype) + zero.unsqueeze(-1)
        logits = logits / self.temperature if self.temperature != 1 else logits  # not a copy more
        if 0 < self.top_k < logits.shape[-1]:
            least = active().kth_largest(logits, self.top_k)
            probs = active().kept_softmax(logits, least)
        else:
            probs = logits.softmax(dim=-1)
        if self.top_p < 1:
            probs = active().nucleus(probs, self.top_p)
        if self.min_p > 0:
            probs = probs.masked_fill(probs < self.min_p * probs.amax(dim=-1, keepdim=True), 0)
            probs = probs / probs.sum(dim=-1, keepdim=True)
        return probs

    def draw(self, probs: Tensor, uniform: Tensor) -> Tensor:
        """Return token ids (...) drawn at `uniform` (...) from distributions (..., V) that this
        warp made.
        """
        return active().most_likely(probs) if self.greedy else sample(probs, uniform)


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens (...) by logits (..., V), and 0 (...), which is NaN where a
    logit is.
    """
    best = active().most_likely(logits)
    return best, 0 * logits.gather(-1, best.unsqueeze(-1)).squeeze(-1)


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, or unchanged where it is wider: half-precision logits must not reach a
    softmax.
    """
    return x if x.dtype == torch.float64 else x.float()


def sample(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return token ids (...) drawn from `probs` (..., V), which need not sum to one, at `uniform`
    (...) in [0, 1).
    """
    return active().token_at(at_least_float32(probs), uniform.to(probs.device).double())


class Uniforms:
    """A stream of uniform numbers that depends on its seed alone, made on the host and copied to
    `device` in blocks.
    """

    BLOCK = 1024

    def __init__(self, device: torch.device, *seed: int) -> None:
        self.device = device
        self._random = np.random.default_rng(seed)
        self._block = torch.empty(0)
        self._next = 0
        self._end = 0
        self._numbers: list[float] | None = None

    def take(self, count: int) -> Tensor:
        """Return the next numbers (count,), float64 in [0, 1)."""
        if self._next + count > self._end:
            self._begin_block(count)
        self._next += count
        return self._block[self._next - count : self._next]

    def take_up_to(self, count: int) -> Tensor:
        """Return the next numbers, `count` or as many as were made at once.

        The stream is that of single numbers.
        """
        return self.take(min(count, self._end - self._next) or 1)

    def number(self) -> float:
        """Return the next number as a number of the host; the stream's device must be the CPU."""
        if self._next >= self._end:
            self._begin_block(1)
        if self._numbers is None:
            self._numbers = self._block.tolist()
        self._next += 1
        return self._numbers[self._next - 1]

    def give_back(self, count: int) -> None:
        """Put the last `count` numbers of the last `take` back, so that the next `take` returns
        them again.
        """
        self._next -= count

    def _begin_block(self, count: int) -> None:
        drawn = torch.from_numpy(self._random.random(max(self.BLOCK, count)))
        self._block = drawn.to(self.device, non_blocking=True)
        self._next = 0
        self._end = len(drawn)
        self._numbers = None


class GivenUniforms(Uniforms):
    """A stream, on the host, of numbers (n,) that were made before.

    It does not go on after the last.
    """

    def __init__(self, numbers: np.ndarray) -> None:
        super().__init__(torch.device("cpu"))
        self._block = torch.from_numpy(np.ascontiguousarray(numbers))
        self._end = len(numbers)

    def _begin_block(self, count: int) -> None:
        raise RuntimeError(f"all {self._end} given numbers are taken")


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return `sum_x min(t, d) = 1 - TV(t, d)` (...), the expected acceptance of one drafted
    token.
    """
    return torch.minimum(target_probs, draft_probs).sum(dim=-1)


def accept_prob(target_prob: Tensor, draft_prob: Tensor) -> Tensor:
    """Return `min(1, t / d)` (...), the probability that token verification accepts such a token.

    0 / 0 counts as rejected.
    """
    return torch.where(
        draft_prob > 0,
        (target_prob / draft_prob.clamp_min(torch.finfo(draft_prob.dtype).tiny)).clamp_max(1.0),
        0.0,
    )


class NotFinite(UserError):
    """A model's logits were NaN or infinite."""


def has_nan(probs: Tensor) -> Tensor:
    """Return which distributions (...) of `probs` (..., V) come from logits with a NaN.

    A Warp makes all of such a row NaN.
    """
    return probs[..., 0].isnan()


def check_finite(model_id: str, probs: Tensor) -> None:
    """Raise NotFinite if a distribution that a Warp made is NaN."""
    check_numbers(model_id, probs[..., 0])  # all of such a row is NaN


def check_numbers(model_id: str, *results: Tensor) -> None:
    """Raise NotFinite if something that was computed from a model's logits or states has a NaN."""
    if any(result.isnan().any() for result in results):
        raise NotFinite(nan_message(model_id))


def naming_rows(
    compute: Callable[[Sequence[Row]], Result], rows: Sequence[Row], where: Callable[[Row], str]
) -> Result:
    """Return what `compute` returns of some rows.

    Raises UserError that names the first row that is NotFinite alone: what is NaN in one text may
    spread to those that are read with it.
    """
    try:
        return compute(rows)
    except NotFinite:
        for row in rows:
            try:
                compute([row])
            except NotFinite as error:
                raise UserError(f"{where(row)}: {error}") from None
        raise


def nan_message(model_id: str, num_tokens: int | None = None) -> str:
    """Return what to say of a model whose logits had a NaN, after `num_tokens` of a response."""
    after = "" if num_tokens is None else f" after {num_tokens} tokens of the response"
    return (
        f"{model_id} produced NaN logits, or infinite ones{after}; expected finite numbers. Try"
        " dtype=float32 (or bfloat16 in place of float16), and check the weights."
    )
