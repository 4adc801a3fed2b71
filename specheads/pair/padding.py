"""Rows of different lengths in batches.

All depends on lengths alone, so the same rows always make the same numbers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Padded tokens that a model reads at once: on two CPU cores 2048 and 16384 take 1.1 and 1.3 times
# as long
BATCH_TOKENS = 4096
# Logits or probabilities of one model that are held at once: 64 MiB in float32
SLICE_ELEMENTS = 2**24


def by_length(lengths: Sequence[int]) -> list[int]:
    """Return the rows from the shortest to the longest; rows of equal length keep their order."""
    return sorted(range(len(lengths)), key=lengths.__getitem__)


def batches_of_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return batches of rows of similar length whose padded size is at most `max_tokens`, unless a
    single row is larger.
    """
    batches: list[list[int]] = []
    for row in by_length(lengths):
        if not batches or (len(batches[-1]) + 1) * lengths[row] > max_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def slices(num_rows: int, row_size: int, max_elements: int) -> list[slice]:
    """Return consecutive slices of rows, each of at most `max_elements` numbers or one row.

    At least one, even if it is empty.
    """
    size = max(1, max_elements // row_size)
    return [slice(start, min(start + size, num_rows)) for start in range(0, max(1, num_rows), size)]


def right_padded(texts: Sequence[Sequence[int] | np.ndarray]) -> Tensor:
    """Return token ids (B, T) long with zeros after the end of each row, which a causal model never
    sees from within the row.
    """
    return pad_sequence(
        [torch.from_numpy(np.asarray(text, dtype=np.int64)) for text in texts], batch_first=True
    )
