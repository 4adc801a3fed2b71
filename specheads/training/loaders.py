"""Batches for training, in an order that a resumed run continues."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import numpy as np
from torch.utils.data import DataLoader, Sampler

Key = tuple[int, int]  # epoch and row


class EpochSampler(Sampler):
    """Yields (epoch, row) so that the data knows the epoch.

    Every process takes a part of each batch, of `batch_size` rows.

    All must take the same steps: without a row in an epoch's last batch, a process takes its first;
    see `ResumableData.has_rows`.
    """

    def __init__(
        self,
        num_rows: int,
        seed: int,
        shuffle: bool,
        rank: int = 0,
        world_size: int = 1,
        batch_size: int | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self.batch_size = batch_size or world_size
        self.epoch = 0
        self.start = 0  # rows of this process to skip, because the interrupted run has used them

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch  # as Lightning does before each

    def __len__(self) -> int:
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole * (self.batch_size // self.world_size) + len(
            self.part([(0, row) for row in range(rest)])
        )

    def keys(self, epoch: int) -> list[Key]:
        """Return the keys of an epoch for all processes."""
        if not self.shuffle:
            return [(0, row) for row in range(self.num_rows)]
        return [
            (epoch, int(row))
            for row in np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        ]

    def part(self, keys: Sequence[Key]) -> list[Key]:
        """Return this process's part of `keys`, which begin at a batch."""
        batches = (
            keys[start : start + self.batch_size] for start in range(0, len(keys), self.batch_size)
        )
        return [
            key for batch in batches for key in batch[self.rank :: self.world_size] or batch[:1]
        ]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.part(self.keys(self.epoch))[self.start :])


class ResumableLoader(DataLoader):
    """A loader over an EpochSampler that can resume within an epoch: Lightning keeps its state in
    checkpoints.
    """

    sampler: EpochSampler
    batch_size: int
    position = 0  # batches of this epoch that were handed out
    skip = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch declares a private class of iterators
        self.position = self.skip
        self.skip = 0
        self.sampler.start = self.position * self.batch_size
        for batch in super().__iter__():
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.sampler.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.sampler.set_epoch(state["epoch"])
        self.skip = state["position"]


class ResumableData(L.LightningDataModule):
    """Batches from the rows of the splits `train`, `dev` and `test`."""

    def __init__(
        self, splits: Mapping[str, Any], batch_size: int, seed: int, collate: Callable[[list], Any]
    ) -> None:
        """Load the rows of `splits`, whose keys are (epoch, row).

        `batch_size` is that of all processes together.
        """
        super().__init__()
        self.splits = splits
        self.batch_size = batch_size
        self.seed = seed
        self.collate = collate
        self._train: ResumableLoader | None = None
        self._place: dict[str, int] = {}

    def loader(self, split: str, shuffle: bool = False, shared: bool = True) -> ResumableLoader:
        """Return a loader of a split, which is as in epoch 0 unless shuffled.

        Not `shared`, every process gets all rows.
        """
        rank, world_size = self._place_among_processes() if shared else (0, 1)
        data = self.splits[split]
        sampler = EpochSampler(len(data), self.seed, shuffle, rank, world_size, self.batch_size)
        return ResumableLoader(
            data, batch_size=self.batch_size // world_size, sampler=sampler, collate_fn=self.collate
        )

    def _place_among_processes(self) -> tuple[int, int]:
        return (
            (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        )

    def has_rows(self, split: str, batch_index: int) -> bool:
        """Return whether this process's part of a batch is its own.

        A row of another process must not count twice.
        """
        return batch_index * self.batch_size + self._place_among_processes()[0] < len(
            self.splits[split]
        )

    def train_dataloader(self) -> ResumableLoader:
        self._train = self.loader("train", shuffle=True)
        if self._place:
            self._train.load_state_dict(self._place)
        return self._train

    # Lightning restores loaders too, but not those that exist before the optimizer, and its
    # schedule needs their length.
    def state_dict(self) -> dict[str, int]:
        if self._train is None:
            return {}
        state = self._train.state_dict()
        loop = self.trainer.fit_loop
        if (
            loop.epoch_progress.current.processed > loop.epoch_progress.current.completed
        ):  # the epoch is at its end
            return {"epoch": state["epoch"] + 1, "position": 0}
        return state

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._place = state_dict
        if (
            self._train is not None
        ):  # where weights are spread, Lightning restores a run after it has made the optimizer
            self._train.load_state_dict(state_dict)

    def val_dataloader(self) -> ResumableLoader:
        return self.loader("dev")

    def test_dataloader(self) -> ResumableLoader:
        return self.loader("test")
