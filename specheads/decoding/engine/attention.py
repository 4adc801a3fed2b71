"""Attention of steps on a GPU: the queries of a group together, and memory in parts that are read at the same time.

Static memory needs a mask, which torch's flash attention does not take. For the kernel that takes one, transformers copies keys
and values once for every query head, and that kernel has one block of threads for a head, however long the memory is. Here the
queries that share keys are rows of one query, nothing is copied, and each part of the memory has its block of threads. The parts'
results are weighted by their sums of exponentials (Dao et al. 2023, Flash-Decoding). Masks of trees are masks like others.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specheads.pair.sampling import Operations, at_least_float32, computing_with

logger = logging.getLogger(__name__)

PART = 128  # keys; sizes of memory that a captured step reads are multiples of it
MASKED = -1e30  # added to a masked score; with infinity, a part that is masked throughout would be NaN
OTHER_ATTENTION = ("dropout", "is_causal", "position_bias", "softcap", "cache")  # options that only transformers' attention has


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Return the attention (B, T, H, D) of `query` (B, H, T, D) over `key` and `value` (B, G, S, D), S a multiple of PART.

    Args:
        mask: (B or 1, 1, T, S) bool, which keys a token attends to, one at least.
        scale: of scores; default 1 / sqrt(D).
    """
    batch, heads, tokens, _ = query.shape
    groups, num_parts, share = key.shape[1], key.shape[2] // PART, heads // key.shape[1]

    def in_parts(memory: Tensor) -> Tensor:
        return memory[:, :, : num_parts * PART].unflatten(2, (num_parts, PART)).flatten(0, 1)  # (B G, P, PART, D)

    rows = query.reshape(batch * groups, 1, share * tokens, query.shape[-1]).expand(-1, num_parts, -1, -1)
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
    bias = bias.masked_fill(~mask, max(MASKED, torch.finfo(query.dtype).min))[:, 0, :, : num_parts * PART]
    bias = bias.unflatten(2, (num_parts, PART)).transpose(1, 2)[:, None, :, None]  # (B or 1, 1, P, 1, T, PART)
    bias = bias.expand(batch, groups, -1, share, -1, -1) if mask.shape[0] > 1 else bias.expand(-1, -1, -1, share, -1, -1)
    bias = bias.reshape(-1, num_parts, share * tokens, PART).expand(batch * groups, -1, -1, -1)
    out, log_sums = attend_parts(rows, in_parts(key), in_parts(value), bias, query.shape[-1] ** -0.5 if scale is None else scale)
    whole = (log_sums.softmax(dim=1)[..., None] * out).sum(dim=1).to(query.dtype)
    return whole.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous()


def attend_parts(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return each part's attention (N, P, R, D), and the logarithms of its sums of exponentials (N, P, R)."""
    if query.is_cuda and query.dtype != torch.float64:  # which the kernel does not have
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        out, log_sums, *_ = efficient(query, key, value, bias, True, scale=scale)
        return out, log_sums[..., : query.shape[2]]  # the kernel fills rows up
    query, key, value = (at_least_float32(tensor) for tensor in (query, key, value))
    scores = scale * query @ key.transpose(-1, -2) + bias
    log_sums = scores.logsumexp(dim=-1)
    return (scores - log_sums[..., None]).exp() @ value, log_sums


class GroupedOperations(Operations):
    """Attention in groups, under masks that it can take."""

    def attention(
        self, plain: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        if mask is None or mask.dtype != torch.bool or mask.shape[1] > 1 or has_other_options(options):
            return plain(module, query, key, value, mask, **options)
        return attend(query, key, value, mask, options.get("scaling")), None


def has_other_options(options: Mapping[str, Any]) -> bool:
    """Whether attention is called with options that only transformers' attention has."""
    return any(isinstance(x, Tensor) or x for x in (options.get(name) for name in OTHER_ATTENTION))


@contextmanager
def computing(operations: Operations) -> Iterator[None]:
    """While it is active, forward passes and warps compute with `operations`; for code that is traced or captured.

    Models find their attention in a table of transformers, which holds that of the operations meanwhile.
    """
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = partial(operations.attention, plain)
    try:
        with computing_with(operations):
            yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # the library's own attention, which ours hid, is visible again
        if ALL_ATTENTION_FUNCTIONS["sdpa"] is not plain:  # someone else's was hidden
            ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
