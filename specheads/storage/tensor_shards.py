"""Tensors of many rows on disk, in safetensors shards that are made once and mapped when they are read.

Every shard holds the tensors of its rows one after another, and `ends` (rows,), the position at which each row ends.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specheads.storage.shards import ShardStore

logger = logging.getLogger(__name__)

GIB = 2**30
SHARD_BYTES = 2**28  # while a shard is made, twice as much is held in memory


def spans(sizes: np.ndarray) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of each shard, for rows of `sizes` bytes.

    The rows of a shard after its first one have less than SHARD_BYTES.
    """
    shard = np.cumsum(sizes) // SHARD_BYTES
    starts = np.flatnonzero(np.diff(shard, prepend=-1))
    return list(zip(starts.tolist(), np.diff(starts, append=len(sizes)).tolist(), strict=True))


def make_missing(
    folder: Path,
    provenance: Mapping[str, Any],
    num_rows: Mapping[str, int],
    compute: Callable[[str], dict[str, Tensor]],
    what: str,
    gib: float,
) -> None:
    """Compute the shards of a store that are missing or damaged; another process that needs them, too, waits.

    Args:
        provenance: everything that decides the store's content.
        num_rows: number of rows of each shard, by its name.
        compute: returns the tensors of the shard with a given name.
        what: describes the store in the log.
        gib: largest size that the whole store may reach.
    """
    store = ShardStore(folder, provenance)
    # An earlier training run may have completed the store with fewer shards.
    if store.is_complete() and all(name in store.shards for name in num_rows):
        logger.info("%s: complete in %s", what, folder)
        return
    names = list(num_rows)
    with store.missing(names) as missing, Progress(transient=True) as bar:
        logger.info("%s: at most %.2f GiB, %d of %d shards to do, in %s", what, gib, len(missing), len(names), folder)
        done = bar.add_task(what, total=len(missing))
        for name in missing:
            store.put(name, num_rows[name], partial(save_file, compute(name)))
            bar.advance(done)
        store.complete(names)


def packed(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of a shard: those of its rows, (n, ...) each, one after another, and `ends`."""
    ends = torch.tensor([len(next(iter(row.values()))) for row in rows]).cumsum(0)
    return {name: torch.cat([row[name] for row in rows]).contiguous() for name in rows[0]} | {"ends": ends}


class ShardReader:
    """Reads rows. It can be sent to the processes of a loader, each of which opens the files itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, tuple[Any, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def row(self, name: str, number: int) -> dict[str, Tensor]:
        """Return the tensors of row `number` of a shard."""
        if name not in self._open:
            file = safe_open(self.folder / name, "pt")
            self._open[name] = file, file.get_tensor("ends")
        file, ends = self._open[name]
        span = slice(int(ends[number - 1]) if number else 0, int(ends[number]))
        return {key: file.get_slice(key)[span] for key in file.keys() if key != "ends"}  # noqa: SIM118
