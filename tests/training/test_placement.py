"""Where lightning.Trainer is told to train."""

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed import HashStore

from specheads import UserError
from specheads.processes import Processes
from specheads.training.distill.settings import Distillation
from specheads.training.heads.settings import HeadTraining
from specheads.training.settings import TrainerSettings
from specheads.training.trainer import SrunEnvironment, num_processes, placement

ALONE = Processes(None, 0, 1, 0, 1)
TORCHRUN = Processes("torchrun", 3, 8, 1, 2)  # 4 machines
SRUN = Processes("srun", 3, 4, 1, 2)


def test_a_launcher_says_how_many_processes_there_are(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    for processes, environment, nodes in (
        (TORCHRUN, TorchElasticEnvironment, 4),
        (SRUN, SrunEnvironment, 2),
    ):
        found = placement(TrainerSettings(), "cpu", processes)
        assert (found["devices"], found["num_nodes"]) == (2, nodes)
        assert [type(each) for each in found["plugins"]] == [environment]
    assert not placement(TrainerSettings(), "cpu", SRUN)["plugins"][0].auto_requeue
    alone = placement(TrainerSettings(devices=3), "cpu", ALONE)
    assert (
        alone["devices"] == 3
        and isinstance(alone["plugins"][0], LightningEnvironment)
        and "num_nodes" not in alone
    )


def test_fsdp2_spreads_weights_over_all_processes():
    strategy, other = (
        placement(TrainerSettings(devices=devices, strategy="fsdp2"), "cpu", processes)["strategy"]
        for devices, processes in ((1, TORCHRUN), (3, ALONE))
    )
    for found, size in ((strategy, 8), (other, 3)):
        assert isinstance(found, ModelParallelStrategy)
        assert (
            found._data_parallel_size,
            found._tensor_parallel_size,
            found._save_distributed_checkpoint,
        ) == (size, 1, False)
    with pytest.raises(UserError, match="precision=16-mixed with trainer.strategy=fsdp2"):
        placement(TrainerSettings(strategy="fsdp2", precision="16-mixed"), "cuda", ALONE)


@pytest.mark.parametrize(
    ("settings", "processes", "message"),
    [
        ({"num_nodes": 2}, ALONE, "trainer.num_nodes=2 needs a launcher .* torchrun or srun"),
        (
            {"num_nodes": 2},
            TORCHRUN,
            "trainer.num_nodes=2, but torchrun has started 2 processes on each of 4 machines",
        ),
        (
            {"devices": 8},
            TORCHRUN,
            "trainer.devices=8, but torchrun has started 2 processes on each of 4 machines",
        ),
        ({"devices": 4}, SRUN, "trainer.devices=4, but srun has started 2 processes"),
    ],
)
def test_settings_that_contradict_the_launcher_are_refused(settings, processes, message):
    with pytest.raises(UserError, match=message):
        placement(TrainerSettings(**settings), "cpu", processes)


def test_the_number_of_machines_may_be_repeated():
    assert placement(TrainerSettings(num_nodes=4, devices=2), "cpu", TORCHRUN)["num_nodes"] == 4
    assert placement(TrainerSettings(num_nodes=1, devices="auto"), "cpu", TORCHRUN)["devices"] == 2


@pytest.mark.parametrize(("devices", "expected"), [(1, 1), (3, 3), ([0, 1, 3], 3), ("auto", 1)])
def test_devices_are_counted_as_lightning_counts_them(devices, expected):
    assert num_processes(TrainerSettings(devices=devices), "cpu", ALONE) == expected
    assert num_processes(TrainerSettings(devices=devices), "cpu", TORCHRUN) == 8


@pytest.mark.parametrize("devices", [0, -1, True, 1.0, "2", "all", None, (0, 1), [], [0, 0], ["0"]])
@pytest.mark.parametrize("kind", [HeadTraining, Distillation])
def test_other_devices_are_refused(kind, devices):
    with pytest.raises(UserError, match=r"devices=.* must be a positive integer, auto, or a list"):
        kind(trainer={"devices": devices})


def test_where_a_run_trains_does_not_decide_what_it_learns():
    settings = [
        HeadTraining(trainer=trainer).cache_key()
        for trainer in (
            {},
            {"devices": 4},
            {"num_nodes": 2, "strategy": "ddp"},
            {"accelerator": "cpu"},
        )
    ]
    assert all(each == settings[0] for each in settings)
    assert HeadTraining(trainer={"limit_train_batches": 3}).cache_key() != settings[0]


def test_restarted_processes_begin_their_group_under_another_name(monkeypatch):
    """In torchrun's store there are still the addresses of the processes from before."""
    stores = []

    def rendezvous(method, rank, count):
        stores.append(HashStore())
        return [(stores[-1], rank, count)]

    monkeypatch.setattr("specheads.training.trainer.rendezvous", rendezvous)
    placement(TrainerSettings(), "cpu", Processes("torchrun", 0, 1, 0, 1))
    assert not torch.distributed.is_initialized() and not stores
    try:
        placement(TrainerSettings(), "cpu", Processes("torchrun", 0, 1, 0, 1, restarts=2))
        assert torch.distributed.get_backend() == "gloo" and torch.distributed.get_world_size() == 1
        assert len(stores) == 1 and stores[0].num_keys()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
