"""The batches of training: the same for any number of processes, and continued where a run was
stopped.
"""

import pytest

from specheads.errors import UserError
from specheads.training.heads.settings import HeadTraining
from specheads.training.loaders import Batches


class Keys:
    """Rows that are their own keys."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, key):
        return key


def batches(num_rows=10, batch_size=3, seed=5, epoch=0, rank=0, world_size=1):
    made = Batches(Keys(num_rows), batch_size, list, seed, rank, world_size)
    made.set_epoch(epoch)
    return made


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_rows", [1, 12, 13, 31])
@pytest.mark.parametrize("seed", [None, 5])
def test_batches_are_the_same_for_any_number_of_processes(num_rows, world_size, seed):
    """Each process has an equal part of each batch, and its first row where there is none left."""
    whole = list(batches(num_rows, 12, seed))
    assert sorted(row for batch in whole for _, row in batch) == list(range(num_rows))
    parts = [
        list(batches(num_rows, 12, seed, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len(batches(num_rows, 12, seed)) == len(whole)
    for number, batch in enumerate(whole):
        here = [part[number] for part in parts]
        with_rows = here[: len(batch)]
        assert sorted(key for part in with_rows for key in part) == sorted(batch)
        assert max(map(len, with_rows)) == -(-len(batch) // world_size)
        assert all(part == batch[:1] for part in here[len(batch) :])


def test_every_epoch_has_its_own_order_which_depends_on_the_seed():
    orders = {}
    for epoch in range(3):
        (batch,) = batches(50, 50, epoch=epoch)
        assert {number for number, _ in batch} == {epoch}
        orders[epoch] = [row for _, row in batch]
    assert len(set(map(tuple, [range(50), *orders.values()]))) == 4
    assert [[(1, row) for row in orders[1]]] == list(batches(50, 50, epoch=1))
    assert list(batches(50, 50, seed=6, epoch=1)) != list(batches(50, 50, epoch=1))


def test_batches_that_are_not_shuffled_are_those_of_epoch_zero():
    assert list(batches(4, 3, seed=None, epoch=3)) == [[(0, 0), (0, 1), (0, 2)], [(0, 3)]]


@pytest.mark.parametrize("position", range(4))
def test_batches_resume_at_their_saved_state(position):
    whole = list(batches(epoch=2))
    stopped = batches(epoch=2)
    for _ in zip(range(position), stopped, strict=False):
        pass
    resumed = batches()
    resumed.load_state_dict(stopped.state_dict())
    assert list(resumed) == whole[position:]
    resumed.set_epoch(3)
    assert list(resumed) == list(batches(epoch=3))  # the next epoch leaves nothing out


def test_batches_that_cannot_be_split_are_refused():
    HeadTraining(loader={"batch_size": 6}).check_processes(3)
    with pytest.raises(
        UserError, match=r"loader.batch_size=16 rows .* over 3 processes; give a multiple of 3"
    ):
        HeadTraining(loader={"batch_size": 16}).check_processes(3)
