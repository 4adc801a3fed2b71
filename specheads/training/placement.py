"""On which processes and devices lightning.Trainer trains: those that a launcher has started, or those that it starts itself."""

import atexit
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed import PrefixStore, rendezvous

from specheads.errors import UserError
from specheads.processes import Processes
from specheads.training.process_checks import check_devices, check_launcher, num_processes
from specheads.training.trainer_settings import TrainerSettings

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment

FSDP2 = "fsdp2"  # our name for a strategy that Lightning has no name for


class SrunEnvironment(SLURMEnvironment):
    """SLURM's variables of a step, which may have fewer processes and machines than its job."""

    def world_size(self) -> int:
        return Processes.this().count

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Do nothing: the numbers are those of `Processes`."""


def placement(settings: TrainerSettings, device_type: str, processes: Processes | None = None) -> dict[str, Any]:
    """Return the arguments of lightning.Trainer that say where it trains.

    Raises:
        UserError: settings that contradict the launcher, several machines without one, or fewer GPUs than processes.
    """
    processes = processes or Processes.this()
    accelerator = device_type if settings.accelerator == "auto" else settings.accelerator
    check_launcher(settings, processes)
    if processes.launcher is None:
        arguments = {"devices": settings.devices}
    else:
        check_devices(processes, accelerator)
        join_again(processes, accelerator)
        arguments = {"devices": processes.count_here, "num_nodes": processes.num_machines}
    if settings.other("strategy") == FSDP2:
        if settings.precision == "16-mixed":
            raise UserError(
                "trainer.precision=16-mixed with trainer.strategy=fsdp2: gradients that are spread over processes cannot be "
                "scaled; use trainer.precision=bf16-mixed or 32-true."
            )
        size = num_processes(settings, accelerator, processes)
        arguments["strategy"] = ModelParallelStrategy(size, tensor_parallel_size=1, save_distributed_checkpoint=False)
    return arguments | {"accelerator": accelerator, "plugins": [environment_of(processes)]}


def join_again(processes: Processes, accelerator: str) -> None:
    """Begin the process group of processes that torchrun has restarted, where there is none.

    Lightning would begin it in torchrun's store, which still has the addresses of the processes from before the restart.
    """
    if not processes.restarts or processes.launcher != "torchrun" or torch.distributed.is_initialized():
        return
    store, *_ = next(iter(rendezvous("env://", processes.rank, processes.count)))
    on_gpu = accelerator in ("cuda", "gpu")
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=PrefixStore(f"restart-{processes.restarts}", store),
        rank=processes.rank,
        world_size=processes.count,
        device_id=torch.device("cuda", processes.local_rank) if on_gpu else None,
    )
    if on_gpu:
        atexit.register(torch.distributed.destroy_process_group)


def environment_of(processes: Processes) -> "ClusterEnvironment":
    """Return where Lightning reads its ranks."""
    if processes.launcher == "torchrun":
        return TorchElasticEnvironment()
    if processes.launcher == "srun":
        return SrunEnvironment(auto_requeue=False)  # a run that is started again resumes from its own checkpoint
    return LightningEnvironment()  # within a scheduler's job too, this process starts the others itself
