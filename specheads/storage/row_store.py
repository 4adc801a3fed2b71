"""Tensors that are computed once for each row of some data, and kept on disk in safetensors shards.

Every shard holds the tensors of its rows one after another, and `ends` (rows,), the position at
which each row ends.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specheads.progress import finished, progress, stage
from specheads.storage.files import space_of
from specheads.storage.shards import ShardStore, fingerprint

logger = logging.getLogger(__name__)

GIB = 2**30
Compute = Callable[[str, Sequence[int]], Sequence[Mapping[str, Tensor]]]
Batches = Callable[[str, range], Sequence[Sequence[int]]]
SHARD_BYTES = 2**28  # while a shard is made, twice as much is held in memory


class RowStore:
    """The tensors of rows, in `folder`/<fingerprint of their provenance>."""

    def __init__(
        self,
        folder: Path,
        provenance: Mapping[str, object],
        sizes: Mapping[str, np.ndarray],
        what: str,
    ) -> None:
        """Plan a store of rows with `sizes`, the most bytes of each, by the beginning of the names
        of their shards.
        """
        self.provenance = provenance
        self.what = what
        self.sizes = sizes
        self.folder = folder / fingerprint(provenance)
        self.parts: dict[str, tuple[str, range]] = {}  # where each part is: the name of its shard
        self._firsts: dict[str, np.ndarray] = {}
        for start, rows in sizes.items():
            # The rows of a shard after its first one have less than SHARD_BYTES.
            firsts = np.flatnonzero(np.diff(np.cumsum(rows) // SHARD_BYTES, prepend=-1))
            self._firsts[start] = firsts
            for first, end in zip(firsts.tolist(), [*firsts[1:].tolist(), len(rows)], strict=False):
                self.parts[_name(start, first)] = start, range(first, end)
        self._open: dict[str, tuple[Any, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(int(rows.sum()) for rows in self.sizes.values())

    def fits(self, budget: float) -> bool:
        """Return whether the store is within a budget in GiB, and what it lacks fits on the
        disk.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        present = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        return (
            self.num_bytes <= budget * GIB
            and self.num_bytes - present <= shutil.disk_usage(self.folder.parent).free
        )

    def fill(
        self, compute: Compute, memory: str, batches: Batches = lambda start, rows: [rows]
    ) -> None:
        """Make the shards that are missing or damaged; another process that needs them, too, waits.

        `compute` returns the tensors (n, ...) of each of some rows, `batches` which rows of a shard
        it gets together; `memory` is for the log.
        """
        store = ShardStore(self.folder, self.provenance)
        names = list(self.parts)
        # An earlier training run may have completed the store with fewer shards.
        if store.is_complete() and all(name in store.shards for name in names):
            finished(self.what, f"reused from {self.folder}")
            return
        with store.missing(names) as missing, stage(self.what) as say:
            to_do = sum(
                int(self.sizes[start][rows].sum())
                for start, rows in (self.parts[name] for name in missing)
            )
            space = space_of(self.what, to_do, self.folder)
            logger.info(
                "%s: %d of %d shards to do, %s, %s",
                self.what,
                len(missing),
                len(names),
                space,
                memory,
            )
            with progress(self.what, to_do) as advance:
                for name in missing:
                    (start, rows) = self.parts[name]
                    made = dict[int, Mapping[str, Tensor]]()
                    for some in batches(start, rows):
                        made |= zip(some, compute(start, some), strict=True)
                        advance(float(self.sizes[start][some].sum()))
                    store.put(
                        name, len(rows), partial(save_file, _packed([made[row] for row in rows]))
                    )
            store.complete(names)
            say(f"along {sum(map(len, self.sizes.values())):,} texts")

    def row(self, start: str, number: int) -> dict[str, Tensor]:
        """Return the tensors of a row among those whose shards' names begin with `start`."""
        firsts = self._firsts[start]
        first = int(firsts[np.searchsorted(firsts, number, side="right") - 1])
        name = _name(start, first)
        number = number - first
        if name not in self._open:
            file = safe_open(self.folder / name, "pt")
            self._open[name] = file, file.get_tensor("ends")
        file, ends = self._open[name]
        span = slice(int(ends[number - 1]) if number else 0, int(ends[number]))
        return {key: file.get_slice(key)[span] for key in file.keys() if key != "ends"}  # noqa: SIM118


def _name(start: str, first: int) -> str:
    return f"{start}{first:08d}.safetensors"


def _packed(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of a shard: those of its rows, (n, ...) each, one after another, and
    `ends`.
    """
    ends = torch.tensor([len(next(iter(row.values()))) for row in rows]).cumsum(0)
    return {name: torch.cat([row[name] for row in rows]).contiguous() for name in rows[0]} | {
        "ends": ends
    }
