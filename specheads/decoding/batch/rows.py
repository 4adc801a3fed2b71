"""The rows of a batch on the host, and the flat arrays in which their tokens go to a step.

A step reads the tokens of all rows one after another, without padding between them: rows are of different lengths, and have
different numbers of tokens to read. Compiled steps take no sizes of one; what they lack is filled up in a spare row of memory,
the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.engine import RowPlaces
from specheads.decoding.records import Round
from specheads.decoding.session import Session


@dataclass
class Row:
    """A prompt that is being decoded."""

    number: int  # of the prompt
    row: int  # of the memory
    session: Session
    num_read: int = 0  # positions in the draft's memory
    num_probs_needed: int = 0  # coming tokens whose verification needs the draft's distribution
    drafted: list[int] = field(default_factory=list)  # in this round
    num_draft_calls: int = 0  # in this round
    rounds: list[Round] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """The most tokens that a draft may have: the target adds one after the accepted ones."""
        return self.session.num_open - 1


class FlatTokens(NamedTuple):
    """The tokens of several rows, as a step reads them."""

    tokens: Tensor  # (N, 1) long
    end: int  # above all positions
    places: RowPlaces
    first: np.ndarray  # (n,), the index of each row's first token
    counts: np.ndarray  # (n,), its number of tokens


def flat_tokens(
    rows: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int], least: int, spare_row: int, device: torch.device
) -> FlatTokens:
    """Return the `tokens` of `rows` that begin at positions `starts`, and zeros in the spare row up to `least` tokens."""
    counts = np.array([len(each) for each in tokens])
    first, total = np.cumsum(counts) - counts, int(counts.sum())
    size = max(total, least)
    flat = np.zeros((3, size), dtype=np.int64)  # tokens, rows, positions
    flat[0, :total] = np.concatenate([np.asarray(each, dtype=np.int64) for each in tokens])
    flat[1, :total], flat[1, total:] = np.repeat(rows, counts), spare_row
    flat[2, :total] = np.arange(total) + np.repeat(np.asarray(starts) - first, counts)
    end = int((np.asarray(starts) + counts).max())
    on_device = torch.from_numpy(flat).to(device)
    return FlatTokens(on_device[0, :, None], end, RowPlaces(on_device[1], on_device[2]), first, counts)


def filled(numbers: np.ndarray, least: int, value: float, device: torch.device) -> Tensor:
    """Return an array (n, ...) as a tensor of at least `least` rows; the added ones contain `value`."""
    if len(numbers) < least:
        numbers = np.concatenate([numbers, np.full((least - len(numbers), *numbers.shape[1:]), value, dtype=numbers.dtype)])
    return torch.from_numpy(numbers).to(device)
