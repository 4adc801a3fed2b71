"""Forward passes over trees of tokens and over tokens of several texts: the position and the attention mask of each token.

A tree lies at the end of a model's memory, its root first. Every node attends to all positions before the root, and within the
tree to those in its row. Positions follow depth, so that a node is read like the last token of its path.

In rows, a token is a row of the batch, with its place in memory: texts of different lengths, and different numbers of tokens of
each, need no padding. All are written before any of them attends, so tokens of one text may be read together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specheads.pair.language_model import LanguageModel

Masks = Tensor | dict[str, Tensor]
RowMemory = list[tuple[Tensor, Tensor]]  # keys and values (R, heads, capacity, head size) of each layer


class TreeSlots(NamedTuple):
    """The last `W` slots of a memory, which hold a tree or will; slot 0 is its root."""

    base: Tensor  # () long, the position of the root
    depth: Tensor  # (W,) long, of each slot, 0 for the root
    seen: Tensor  # (W, W) bool, row i: the slots that slot i attends to, itself included

    @classmethod
    def empty(cls, width: int, device: torch.device) -> "TreeSlots":
        """Return slots that hold a root alone; the others attend only to themselves."""
        zeros = torch.zeros(width, dtype=torch.long, device=device)
        return cls(torch.zeros((), dtype=torch.long, device=device), zeros, torch.eye(width, dtype=torch.bool, device=device))


@contextmanager
def reading_tree(lm: LanguageModel, tree_slots: TreeSlots, start: Tensor, count: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which `lm.hidden_states` reads tokens as nodes of a tree.

    Args:
        tree_slots: the whole tree.
        start: 0-d long, the position of the first token.
        count: tokens to read.
        size: positions of memory that are read.
    """
    width, device = len(tree_slots.depth), tree_slots.depth.device
    place = torch.arange(size, device=device)
    slot = place - tree_slots.base  # negative before the tree
    inside, clamped = (slot >= 0) & (slot < width), slot.clamp(0, width - 1)
    nodes = (start - tree_slots.base + torch.arange(count, device=device)).clamp(0, width - 1)
    seen = (slot < 0) | (inside & tree_slots.seen[nodes][:, clamped])
    position = tree_slots.base + tree_slots.depth[nodes]
    key_position = torch.where(inside, tree_slots.base + tree_slots.depth[clamped], place)
    masks = masks_of(lm, seen[None], position[None, :, None], key_position)
    kwargs = {"position_ids": position.clamp_max(lm.window - 1)[None], "attention_mask": masks}
    with alibi_at(lm, key_position):  # its distances are differences of depth
        yield kwargs


@contextmanager
def alibi_at(lm: LanguageModel, key_position: Tensor, num_rows: int = 1) -> Iterator[None]:
    """Let a model with ALiBi compute it for keys at `key_position` (S,) long; it makes it from masks of two dimensions (B, S)."""
    base_model: Any = lm.model.base_model
    if not hasattr(base_model, "build_alibi_tensor"):
        yield
        return
    make = base_model.build_alibi_tensor
    ones = torch.ones(num_rows, key_position.shape[0], dtype=torch.long, device=key_position.device)
    base_model.build_alibi_tensor = lambda mask, num_heads, dtype: make(ones, num_heads, dtype)[:, :, key_position]
    try:
        yield
    finally:
        del base_model.build_alibi_tensor


def masks_of(lm: LanguageModel, seen: Tensor, position: Tensor, key_position: Tensor) -> Masks:
    """Return the attention mask of `seen` (B, T, S) in the form that a model takes, one for each kind of its layers.

    Args:
        position: (B, T, 1) long, of the tokens.
        key_position: (S,) long, of the memory's places.
    """

    def formed(seen: Tensor) -> Tensor:
        if lm.config._attn_implementation == "sdpa":
            return seen[:, None]
        dtype = lm.output_embedding.weight.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)[:, None]

    window, kinds = getattr(lm.config, "sliding_window", None), getattr(lm.config, "layer_types", None)
    if window is None or (kinds and "sliding_attention" not in kinds):
        return formed(seen)
    near = key_position > position - window
    if not kinds:  # the window slides over every layer, as in Mistral
        return formed(seen & near)
    return {"full_attention": formed(seen), "sliding_attention": formed(seen & near)}


class RowPlaces(NamedTuple):
    """Where tokens are: their rows of the memory and their positions, (N,) long each."""

    rows: Tensor
    positions: Tensor


def slice_of(rows: Tensor) -> slice | None:
    """Return the slice that takes `rows` (N,), or None if they do not follow each other; on a CPU, where asking costs no wait."""
    first = int(rows[0])
    return slice(first, first + len(rows)) if torch.equal(rows, torch.arange(first, first + len(rows))) else None


class StepLayer(CacheLayerMixin):
    """One attention layer's memory inside a step, read as far as `size`; subclasses write into it."""

    is_sliding = False
    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, size: int) -> None:
        super().__init__()
        self.keys, self.values, self.size = keys, values, size
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The memory is there from the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.size, 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class RowsLayer(StepLayer):
    """The memory of tokens at their places in rows."""

    def __init__(self, keys: Tensor, values: Tensor, places: RowPlaces, size: int, chosen: slice | None) -> None:
        """`chosen`: the rows whose keys and values attention gets; None: each token's, copied."""
        super().__init__(keys, values, size)
        self.places, self.chosen = places, chosen

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write keys and values (N, heads, 1, head size), and return those that attention gets."""
        rows, positions = self.places
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        keys, values = self.keys[:, :, : self.size], self.values[:, :, : self.size]
        return (keys[rows], values[rows]) if self.chosen is None else (keys[self.chosen], values[self.chosen])

    def get_seq_length(self) -> int:
        return 0


@contextmanager
def reading_rows(
    lm: LanguageModel, memory: RowMemory, places: RowPlaces, size: int, chosen: slice | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which `lm.hidden_states` reads tokens (N, 1) at their places.

    Args:
        size: positions of memory that are read.
        chosen: the rows whose keys and values attention gets; None: each token's, copied.
    """
    key_position = torch.arange(size, device=places.rows.device)
    positions = places.positions[:, None]
    masks = masks_of(lm, (key_position <= positions)[:, None], positions[:, None], key_position)
    kwargs = {
        "position_ids": positions.clamp_max(lm.window - 1),
        "attention_mask": masks,
        "past_key_values": Cache(layers=[RowsLayer(keys, values, places, size, chosen) for keys, values in memory]),
        "use_cache": True,
    }
    with alibi_at(lm, key_position, places.rows.shape[0]):
        yield kwargs
