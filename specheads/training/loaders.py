"""Batches for training, in an order that a resumed run continues."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import lightning as L
import numpy as np

from specheads.pair.padding import BATCH_TOKENS, batches_of_tokens

Key = tuple[int, int]  # epoch and row
Batch = TypeVar("Batch")


def row_batches(rows: range, lengths: Sequence[int]) -> list[list[int]]:
    """Return rows in batches of about as many tokens."""
    batches = []
    for places in batches_of_tokens(lengths, BATCH_TOKENS):
        batches.append([rows[place] for place in places])
    return batches


class Rows(Protocol):
    """The rows of a split, which may differ from epoch to epoch."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Key) -> object: ...


class Batches(Generic[Batch]):
    """This process's part of each batch of `batch_size` rows, in the order of an epoch.

    All processes must take the same steps: one without a row in an epoch's last batch takes the
    first row of that batch; see `ResumableData.has_rows`. Lightning keeps the state in checkpoints.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        collate: Callable[[list], Batch],
        shuffle_seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Take batches of `rows`; without a `shuffle_seed`, in order and as in epoch 0."""
        self.rows = rows
        self.batch_size = batch_size
        self.collate = collate
        self.shuffle_seed = shuffle_seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.position = 0  # batches of this epoch that were handed out
        self._skip = 0  # batches that the interrupted run has used
        # Lightning looks for `set_epoch` in these.
        self.sampler = self
        self.batch_sampler = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch  # as Lightning does before each

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.batch_size)

    def keys(self, epoch: int) -> list[Key]:
        """Return the keys of an epoch for all processes."""
        if self.shuffle_seed is None:
            return [(0, row) for row in range(len(self.rows))]
        order = np.random.default_rng([self.shuffle_seed, epoch]).permutation(len(self.rows))
        return [(epoch, row) for row in order.tolist()]

    def __iter__(self) -> Iterator[Batch]:
        keys = self.keys(self.epoch)
        self.position = self._skip
        self._skip = 0
        for start in range(self.position * self.batch_size, len(keys), self.batch_size):
            batch = keys[start : start + self.batch_size]
            here = batch[self.rank :: self.world_size] or batch[:1]
            self.position += 1
            yield self.collate([self.rows[key] for key in here])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch = state["epoch"]
        self._skip = state["position"]


class ResumableData(L.LightningDataModule, Generic[Batch]):
    """Batches from the rows of the splits `train`, `dev` and `test`."""

    def __init__(
        self,
        splits: Mapping[str, Rows],
        batch_size: int,
        seed: int,
        collate: Callable[[list], Batch],
    ) -> None:
        """Load the rows of `splits` in batches of `batch_size` rows of all processes together."""
        super().__init__()
        self.splits = splits
        self.batch_size = batch_size
        self.seed = seed
        self.collate = collate
        self._train: Batches[Batch] | None = None
        self._place: dict[str, int] = {}

    def batches(self, split: str, shuffle: bool = False, shared: bool = True) -> Batches[Batch]:
        """Return the batches of a split, which are as in epoch 0 unless shuffled.

        Not `shared`, every process gets all rows.
        """
        rank, world_size = self._place_among_processes() if shared else (0, 1)
        seed = self.seed if shuffle else None
        return Batches(self.splits[split], self.batch_size, self.collate, seed, rank, world_size)

    def _place_among_processes(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size

    def has_rows(self, split: str, batch_index: int) -> bool:
        """Return whether a batch has rows for this process.

        A row of another process must not count twice.
        """
        rank, _ = self._place_among_processes()
        return batch_index * self.batch_size + rank < len(self.splits[split])

    def train_dataloader(self) -> Batches[Batch]:
        self._train = self.batches("train", shuffle=True)
        if self._place:
            self._train.load_state_dict(self._place)
        return self._train

    def val_dataloader(self) -> Batches[Batch]:
        return self.batches("dev")

    def test_dataloader(self) -> Batches[Batch]:
        return self.batches("test")

    # Lightning restores batches too, but not those that exist before the optimizer, and its
    # schedule needs their number.
    def state_dict(self) -> dict[str, int]:
        if self._train is None:
            return {}
        state = self._train.state_dict()
        epochs = self.trainer.fit_loop.epoch_progress.current
        if epochs.processed > epochs.completed:  # the epoch is at its end
            return {"epoch": state["epoch"] + 1, "position": 0}
        return state

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._place = state_dict
        # Where weights are spread, Lightning restores a run after it has made the optimizer.
        if self._train is not None:
            self._train.load_state_dict(state_dict)
