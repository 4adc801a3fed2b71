"""Forwards over token trees: where each node stands, and what it sees.

A tree lies at the end of a model's memory, its root first. Everybody sees all that is before the root; of the tree, a node sees what
its row says. Positions follow depth, so that a node is read as the last token of its own path would be.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specheads.pair import LanguageModel

Masks = Tensor | dict[str, Tensor]


class TreeSlots(NamedTuple):
    """The end of a memory, `W` slots that hold a tree or will; slot 0 is its root."""

    base: Tensor  # () long, the position of the root
    depth: Tensor  # (W,) long, of each slot, 0 for the root
    seen: Tensor  # (W, W) bool, row i: the slots that slot i sees, itself included

    @classmethod
    def empty(cls, width: int, device: torch.device) -> "TreeSlots":
        """Return a tail of a root alone, whose other slots see only themselves."""
        zeros = torch.zeros(width, dtype=torch.long, device=device)
        return cls(torch.zeros((), dtype=torch.long, device=device), zeros, torch.eye(width, dtype=torch.bool, device=device))


@contextmanager
def reading_tree(lm: LanguageModel, tree_slots: TreeSlots, start: Tensor, count: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield what `lm.hidden_states` needs to read `count` tokens from position `start` (0-d long) on as nodes of `tail`, with `size`
    positions of memory.
    """
    width, device = len(tree_slots.depth), tree_slots.depth.device
    place = torch.arange(size, device=device)
    slot = place - tree_slots.base  # negative before the tree
    inside, known = (slot >= 0) & (slot < width), slot.clamp(0, width - 1)
    own = (start - tree_slots.base + torch.arange(count, device=device)).clamp(0, width - 1)
    seen = (slot < 0) | (inside & tree_slots.seen[own][:, known])
    position, key_position = (
        tree_slots.base + tree_slots.depth[own],
        torch.where(inside, tree_slots.base + tree_slots.depth[known], place),
    )
    masks = _masks(lm, seen, position, key_position)
    kwargs = {"position_ids": position.clamp_max(lm.window - 1)[None], "attention_mask": masks}
    base_model = lm.model.base_model
    if not hasattr(base_model, "build_alibi_tensor"):
        yield kwargs
        return
    # ALiBi is made from a mask of rows, which a tree has not: its distances are those of depth.
    make = base_model.build_alibi_tensor
    base_model.build_alibi_tensor = lambda mask, num_heads, dtype: make(
        torch.ones(1, size, dtype=torch.long, device=device), num_heads, dtype
    )[:, :, key_position]
    try:
        yield kwargs
    finally:
        del base_model.build_alibi_tensor


def _masks(lm: LanguageModel, seen: Tensor, position: Tensor, key_position: Tensor) -> Masks:
    """Return the attention mask of `seen` (T, S) in the form that a model takes, one for each kind of its layers."""

    def formed(seen: Tensor) -> Tensor:
        if lm.config._attn_implementation == "sdpa":
            return seen[None, None]
        dtype = lm.output_embedding.weight.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)[None, None]

    if "sliding_attention" not in (getattr(lm.config, "layer_types", None) or ()):
        return formed(seen)
    near = key_position > position[:, None] - lm.config.sliding_window
    return {"full_attention": formed(seen), "sliding_attention": formed(seen & near)}
