"""A draft that reads its target along given texts, at every depth: after a first step with the
target's features, and after more steps with own states (the training-time test of EAGLE-3, Li et
al. 2025, section 3.1).

A step reads given tokens, whatever the draft would propose. Its queries see the keys of the first
step up to their pair, and those of later steps at their own pair alone.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from specheads.pair.feature_draft import FeatureDraft
from specheads.pair.sampling import at_least_float32

# Numbers by which queries, keys and values grow: GPUs' attention wants multiples of eight
_MORE = 8


class _Entries(NamedTuple):
    """What a step adds to the KV cache, (B, heads, n, D) each: of its n first pairs."""

    keys: Tensor
    values: Tensor

    def first(self, count: int) -> "_Entries":
        return _Entries(self.keys[:, :, :count], self.values[:, :, :count])


def unrolled(
    draft: FeatureDraft, tokens: Tensor, features: Tensor, drafted: Tensor, begin: int = 0
) -> Iterator[Tensor]:
    """Yield for each step, without end, the hidden states (B, T, H) that predict the token after
    each of `tokens` (B, T) of right-padded texts.

    The first step reads the texts and the target's `features` (B, T, L H_target), all others
    `drafted` (B, T) in place of the texts. After j own steps the state at position t is made of the
    features up to t - 1 - j; where there are none, or t - j is before `begin`, a position, it is 0.
    """
    layer = draft.layers[0]
    num_pairs = tokens.shape[1] - 1
    skipped = max(0, begin - 1)  # pairs that own steps leave out
    embeddings = draft.embed_tokens(tokens[:, 1:])
    of_drafted = draft.embed_tokens(drafted[:, 1:])
    states = draft.first_states(features[:, :-1].to(draft.fc.weight.dtype))
    places = torch.arange(num_pairs, device=tokens.device)[None]
    cos, sin = draft.rotary_emb(states, position_ids=places)
    entries = list[_Entries]()
    counts = filter(None, (num_pairs, *range(num_pairs - skipped - 1, 0, -1)))
    for step, count in enumerate(counts):
        earlier = [each.first(skipped + count) for each in entries[:1]]
        earlier += [each.first(count) for each in entries[1:]]
        states, entry = layer(
            embeddings[:, step:],
            states[:, :count],
            partial(_attend, layer.self_attn, earlier),
            position_embeddings=(cos[:, step:], sin[:, step:]),
        )
        entries.append(entry)
        hidden = draft.norm(states)
        if draft.config.norm_output:
            states = hidden
        if step == 0:
            states, cos, sin = (each[:, skipped:] for each in (states, cos, sin))
            embeddings = of_drafted[:, skipped:]
        yield pad(hidden, (0, 0, tokens.shape[1] - hidden.shape[1], 0))
    yield from repeat(states.new_zeros(*tokens.shape, states.shape[-1]))


def _attend(
    attention: Any,
    earlier: Sequence[_Entries],
    both: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
) -> tuple[Tensor, _Entries]:
    """Return the output (B, n, H) of a layer's attention for its input `both` (B, n, 2 H), and this
    step's entries; `earlier` are those of the steps before, of the same n pairs, and of the first
    step those before them, too.
    """
    shape = (*both.shape[:-1], -1, attention.head_dim)
    queries = attention.q_proj(both).view(shape)
    keys = attention.k_proj(both).view(shape)
    values = attention.v_proj(both).view(shape).transpose(1, 2)
    if hasattr(attention, "q_norm"):
        queries = attention.q_norm(queries)
        keys = attention.k_norm(keys)
    queries, keys = apply_rotary_pos_emb(
        queries.transpose(1, 2), keys.transpose(1, 2), *position_embeddings
    )
    # In mixed precision the angles are in another type
    queries = queries.to(values.dtype)
    entry = _Entries(keys.to(values.dtype), values)
    seen = list[_Entries]()
    for each in [*earlier, entry]:
        seen.append(_Entries(*(repeat_kv(part, attention.num_key_value_groups) for part in each)))
    attended = _attended(queries, seen, attention.scaling)
    return attention.o_proj(attended.transpose(1, 2).flatten(2)), entry


def _attended(queries: Tensor, seen: Sequence[_Entries], scaling: float) -> Tensor:
    """Return what `queries` (B, heads, n, D) find in the entries of all steps.

    Own steps have one key for a query each. Their weights need not be in the attention over the
    first step, of which they are one key more: its score is the logarithm of their sum, and its
    share says how much they weigh. So a step costs what the first does.
    """
    first, *own = seen
    if not own:
        return scaled_dot_product_attention(queries, *first, is_causal=True, scale=scaling)
    size = queries.shape[-1]
    wide = at_least_float32(queries)
    scores = torch.stack([scaling * (wide * each.keys).sum(dim=-1) for each in own], dim=-1)
    total = scores.logsumexp(dim=-1, keepdim=True) / scaling
    high = total.to(queries.dtype)  # its rounding error is another number: types may be narrow
    scored = torch.cat([queries, high, (total - high).to(queries.dtype)], dim=-1)
    key = queries.new_zeros(size + _MORE)
    key[size : size + 2] = 1
    value = queries.new_zeros(size + _MORE)
    value[size] = 1
    keys = _with_first(key, first.keys)
    found = scaled_dot_product_attention(
        pad(scored, (0, _MORE - 2)),
        keys,
        _with_first(value, first.values),
        attn_mask=causal_lower_right(queries.shape[2], keys.shape[2]),
        scale=scaling,
    )
    shares = scores.softmax(dim=-1).to(found.dtype) * found[..., size : size + 1]
    attended = found[..., :size]
    for place, each in enumerate(own):
        attended = attended + shares[..., place : place + 1] * each.values
    return attended


def _with_first(one: Tensor, others: Tensor) -> Tensor:
    """Return `others` (B, heads, n, D), made wider, after `one` (D + _MORE,)."""
    return torch.cat([one.expand(*others.shape[:2], 1, -1), pad(others, (0, _MORE))], dim=2)
