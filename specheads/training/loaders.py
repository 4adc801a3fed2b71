"""Batches for training, in an order that a resumed run continues."""

import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import lightning as L
import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from specheads import interrupts
from specheads.storage import runs


class EpochSampler(Sampler):
    """Yields (epoch, row) so that the data knows the epoch.

    Every process of a distributed run takes a different share. All shares have the same size: a process with fewer rows would
    wait for the others forever.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool, rank: int = 0, world_size: int = 1) -> None:
        self.num_rows, self.seed, self.shuffle, self.rank, self.world_size = num_rows, seed, shuffle, rank, world_size
        self.epoch = 0
        self.start = 0  # rows of this process to skip, because the interrupted run has used them

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as Lightning does before each."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows // self.world_size

    def order(self, epoch: int) -> list[tuple[int, int]]:
        """Return this process's keys of an epoch, all of them."""
        epoch = epoch if self.shuffle else 0
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_rows) if self.shuffle else np.arange(self.num_rows)
        return [(epoch, int(i)) for i in order[self.rank :: self.world_size][: len(self)]]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.order(self.epoch)[self.start :])


class ResumableLoader(DataLoader):
    """A loader over an EpochSampler that can resume within an epoch: Lightning keeps its state in checkpoints."""

    sampler: EpochSampler
    batch_size: int
    position = 0  # batches of this epoch that were handed out
    skip = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch declares a private class of iterators
        self.position, self.skip = self.skip, 0
        self.sampler.start = self.position * self.batch_size
        for batch in super().__iter__():
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the next batch to hand out."""
        return {"epoch": self.sampler.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.sampler.set_epoch(state["epoch"])
        self.skip = state["position"]


def begin_worker(worker: int) -> None:
    """Let the main process alone handle signals and run folders; a loader's process ends with it."""
    runs.release()
    for number in interrupts.SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class Rows(Protocol):
    """The rows of a split, whose keys are (epoch, row)."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: tuple[int, int]) -> Any: ...


class ResumableData(L.LightningDataModule):
    """Batches from the rows of the splits `train`, `dev` and `test`."""

    def __init__(
        self,
        splits: Mapping[str, Rows],
        batch_size: int,
        num_workers: int,
        seed: int,
        collate: Callable[[list], Any],
    ) -> None:
        super().__init__()
        self.splits, self.batch_size, self.num_workers, self.seed = splits, batch_size, num_workers, seed
        self.collate = collate
        self._train: ResumableLoader | None = None
        self._place: dict[str, int] = {}

    def loader(self, split: str, shuffle: bool = False, shared: bool = True) -> ResumableLoader:
        """Return a loader of one split; without shuffling its rows are mixed as in epoch 0, every time.

        `shared`: each process of a distributed run gets a different part; otherwise all get the same rows.
        """
        distributed = shared and self.trainer is not None
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if distributed else (0, 1)
        data = self.splits[split]
        sampler = EpochSampler(len(data), self.seed, shuffle, rank, world_size)
        return ResumableLoader(
            cast(Dataset, data),  # torch takes any object with these two methods
            batch_size=self.batch_size,
            sampler=sampler,
            collate_fn=self.collate,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            worker_init_fn=begin_worker,
        )

    def upcoming(self, key: tuple[int, int], count: int) -> list[tuple[int, int]]:
        """Return the next `count` keys of training, starting with `key`; fewer at the end of an epoch."""
        if self._train is None:
            raise RuntimeError("training has not begun, so no keys are upcoming")
        order = self._train.sampler.order(key[0])
        place = order.index((key[0], key[1]))
        return order[place : place + count]

    def train_dataloader(self) -> ResumableLoader:
        self._train = self.loader("train", shuffle=True)
        if self._place:
            self._train.load_state_dict(self._place)
        return self._train

    # Lightning restores loaders too, but not those that exist before the optimizer, and its schedule needs their length.
    def state_dict(self) -> dict[str, int]:
        if self._train is None:
            return {}
        state = self._train.state_dict()
        loop = self.trainer.fit_loop
        if loop.epoch_progress.current.processed > loop.epoch_progress.current.completed:  # at the end of an epoch
            return {"epoch": state["epoch"] + 1, "position": 0}
        return state

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._place = state_dict

    def val_dataloader(self) -> ResumableLoader:
        return self.loader("dev")

    def test_dataloader(self) -> ResumableLoader:
        return self.loader("test")
