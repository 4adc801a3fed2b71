"""Forward passes over tokens of several texts at once, each in a row of the memory.

A token is a row of the batch, with its place in memory: texts of different lengths, and different numbers of tokens of each,
need no padding. All are written before any of them attends, so tokens of one text may be read together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specheads.decoding.engine.tree_reading import alibi_at, masks_of
from specheads.language_model import LanguageModel

RowMemory = list[tuple[Tensor, Tensor]]  # keys and values (R, heads, capacity, head size) of each layer


class RowPlaces(NamedTuple):
    """Where tokens are: their rows of the memory and their positions, (N,) long each."""

    rows: Tensor
    positions: Tensor


def slice_of(rows: Tensor) -> slice | None:
    """Return the slice that takes `rows` (N,), or None if they do not follow each other; on a CPU, where asking costs no wait."""
    first = int(rows[0])
    return slice(first, first + len(rows)) if torch.equal(rows, torch.arange(first, first + len(rows))) else None


class RowsLayer(CacheLayerMixin):
    """One attention layer's memory inside such a forward pass, read as far as `size`."""

    is_sliding = False
    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, places: RowPlaces, size: int, chosen: slice | None) -> None:
        """`chosen`: the rows whose keys and values attention gets; None: each token's, copied."""
        super().__init__()
        self.keys, self.values, self.places, self.size, self.chosen = keys, values, places, size, chosen
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The memory is there from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write keys and values (N, heads, 1, head size), and return those that attention gets."""
        rows, positions = self.places
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        keys, values = self.keys[:, :, : self.size], self.values[:, :, : self.size]
        return (keys[rows], values[rows]) if self.chosen is None else (keys[self.chosen], values[self.chosen])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.size, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


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
