"""What takes longest in sampling, attention and heads, as an object: torch's operations, or those that an engine was given."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn


class Operations:
    """Operations by torch, and heads and attention as they are; an engine for a device may have others of the same results."""

    def most_likely(self, x: Tensor) -> Tensor:
        """Return the index (...) of the largest number of each row of `x` (..., V), the first NaN where there is one."""
        return x.argmax(dim=-1)

    def kth_largest(self, x: Tensor, k: int) -> Tensor:
        """Return the k-th largest number (..., 1) of each row of `x` (..., V)."""
        return x.topk(k, dim=-1).values[..., -1:]

    def kept_softmax(self, logits: Tensor, least: Tensor) -> Tensor:
        """Return the probabilities (..., V) of the logits (..., V) that are at least `least` (..., 1); the others have none."""
        return logits.masked_fill(logits < least, -torch.inf).softmax(dim=-1)

    def nucleus(self, probs: Tensor, top_p: float) -> Tensor:
        """Return `probs` (..., V) of the smallest set of most likely tokens whose mass reaches `top_p`, renormalised.

        Of equally likely tokens the first are kept.
        """
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.cumsum(dim=-1) - ordered
        kept = ordered.masked_fill(mass_before >= top_p, 0)
        return torch.zeros_like(probs).scatter_(-1, index, kept / kept.sum(dim=-1, keepdim=True))

    def token_at(self, probs: Tensor, uniform: Tensor) -> Tensor:
        """Return the first token ids (...) at which the sum of `probs` (..., V) exceeds `uniform` (...) times their total."""
        return tokens_at(probs, uniform.unsqueeze(-1)).squeeze(-1)

    def head_logits(self, network: Any, features: Mapping[str, Tensor]) -> Tensor:
        """Return the logits (...) of a head's network for named features."""
        return network.score(network.assemble(features))

    def attention(
        self, plain: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        """Return what transformers' attention `sdpa` returns, which is `plain`."""
        return plain(module, query, key, value, mask, **options)


TORCH = Operations()
_active: ContextVar[Operations] = ContextVar("operations", default=TORCH)


def active() -> Operations:
    """Return the operations to compute with."""
    return _active.get()


@contextmanager
def computing_with(operations: Operations) -> Iterator[None]:
    """While it is active, this thread computes with other operations than torch's; for code that is traced or captured."""
    before = _active.set(operations)
    try:
        yield
    finally:
        _active.reset(before)


def tokens_at(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return token ids (..., Q) of the distributions `probs` (..., V) at Q numbers each, `uniforms` (..., Q); see `token_at`.

    Sums are float64, and computed once for all numbers. Rounding must not move the point to the total, which only the tokens
    after the last possible one reach.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    point = torch.minimum(uniforms * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True).clamp_max(probs.shape[-1] - 1)
