"""Tensors that are computed once for each row of some data, and kept on disk in shards."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from specheads.storage.shards import fingerprint
from specheads.storage.tensor_shards import GIB, ShardReader, make_missing, packed, spans


class RowStore:
    """The tensors of rows, in `folder`/<fingerprint of their provenance>; it can be sent to the processes of a loader.

    Shards have checksums and appear by rename; a restart makes the missing ones. They are mapped into memory when they are read.
    """

    def __init__(self, folder: Path, provenance: Mapping[str, Any], sizes: Mapping[str, np.ndarray], what: str) -> None:
        """Plan a store of rows with `sizes`, the most bytes of each, by the beginning of the names of their shards.

        `what` describes the store in the log.
        """
        self.provenance, self.what, self.sizes = provenance, what, sizes
        self.folder = folder / fingerprint(provenance)
        self.parts = {  # by the names of shards
            _name(start, first): (start, range(first, first + count))
            for start, rows in sizes.items()
            for first, count in spans(rows)
        }
        self._firsts = {each: np.array([rows[0] for start, rows in self.parts.values() if start == each]) for each in sizes}
        self._reader = ShardReader(self.folder)

    @property
    def num_bytes(self) -> int:
        """The size of the whole store, at most."""
        return sum(int(rows.sum()) for rows in self.sizes.values())

    def fits(self, budget: float) -> bool:
        """Return whether the store is within a budget in GiB, and what it lacks fits on the disk."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        present = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        return self.num_bytes <= budget * GIB and self.num_bytes - present <= shutil.disk_usage(self.folder.parent).free

    def fill(self, compute: Callable[[str, range], Sequence[Mapping[str, Tensor]]]) -> None:
        """Make the shards that are missing; `compute` returns the tensors (n, ...) of each of some rows."""
        num_rows = {name: len(rows) for name, (_, rows) in self.parts.items()}
        gib = self.num_bytes / GIB
        make_missing(self.folder, self.provenance, num_rows, lambda name: packed(compute(*self.parts[name])), self.what, gib)

    def row(self, start: str, number: int) -> dict[str, Tensor]:
        """Return the tensors of a row among those whose shards' names begin with `start`."""
        firsts = self._firsts[start]
        first = int(firsts[np.searchsorted(firsts, number, side="right") - 1])
        return self._reader.row(_name(start, first), number - first)


def _name(start: str, first: int) -> str:
    return f"{start}{first:08d}.safetensors"
