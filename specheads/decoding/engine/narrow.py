"""Products of weights with few rows, as loops that a compiler fuses; a CPU's BLAS is slow at them.

A forward pass over a few tokens reads every weight once and computes little with it, so memory bandwidth is its limit. BLAS
libraries are made for large matrices and reach a fraction of that limit (benchmarks/README.md); a plain loop over the weight's
rows, with the tokens inside, comes close, at any number of tokens, without a second, packed copy of the weights.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from specheads.sampling import at_least_float32

MOST_ROWS = 32  # with more, BLAS is faster; the usual longest draft, 20 tokens, is still narrow


class NarrowProducts(TorchFunctionMode):
    """While it is active, linear maps and attention are written as loops; for code that is being compiled."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is linear:
            return narrow_linear(*args, **kwargs)
        if func is scaled_dot_product_attention and _is_plain(args, kwargs):
            query, key, value = args
            return narrow_attention(query, key, value, kwargs.get("attn_mask"), kwargs.get("scale"))
        return func(*args, **kwargs)


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x W^T + b` (..., O) of `x` (..., I) and `weight` (O, I)."""
    rows = _stored(x.reshape(-1, x.shape[-1]))
    # Rows of the weight outside, tokens inside: each weight comes from memory once.
    product = _stored((weight[:, None, :] * rows[None, :, :]).sum(dim=-1)).t().reshape(*x.shape[:-1], weight.shape[0])
    return product if bias is None else product + bias


def narrow_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the attention (B, heads, T, D) of `query` (B, heads, T, D) over `key`, `value` (B, heads, S, D).

    Computed in float32 or wider. Keys that several heads share may come expanded: the compiler reads them where they are. Rows
    whose keys are all masked become NaN; causal masks have no such rows.
    """
    dtype = query.dtype
    query, key, value = (at_least_float32(x) for x in (query, key, value))
    query = _stored(query * (query.shape[-1] ** -0.5 if scale is None else scale))
    scores = (key[:, :, :, None, :] * query[:, :, None, :, :]).sum(dim=-1).transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -torch.inf) if mask.dtype == torch.bool else scores + mask
    probs = _stored(scores.softmax(dim=-1))
    return _stored((probs[..., None] * value[:, :, None]).sum(dim=3).to(dtype))


def _is_plain(args: tuple, kwargs: dict) -> bool:
    """Whether `narrow_attention` can compute a call of attention."""
    return len(args) == 3 and not (kwargs.get("dropout_p") or kwargs.get("is_causal") or kwargs.get("enable_gqa"))


def _stored(x: Tensor) -> Tensor:
    """Return `x` as a tensor in memory: fused into the loop that reads it, it would be computed again for every row."""
    # Times one, because Inductor would stride over a view's base from its first number: any row of a matrix would become the
    # first.
    x = (x * 1).contiguous()
    return x.as_strided(x.shape, x.stride())
