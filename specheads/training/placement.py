"""On which processes and devices lightning.Trainer trains: those that a launcher has started, or those that it starts itself."""

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy

from specheads.errors import UserError
from specheads.processes import Processes
from specheads.settings import shown
from specheads.training.trainer_settings import TrainerSettings

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment

FSDP2 = "fsdp2"  # our name for a strategy that Lightning has no name for


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


def environment_of(processes: Processes) -> "ClusterEnvironment":
    """Return where Lightning reads its ranks."""
    if processes.launcher == "torchrun":
        return TorchElasticEnvironment()
    if processes.launcher == "srun":
        return SLURMEnvironment(auto_requeue=False)  # a run that is started again resumes from its own checkpoint
    return LightningEnvironment()  # within a scheduler's job too, this process starts the others itself


def num_processes(settings: TrainerSettings, accelerator: str, processes: Processes | None = None) -> int:
    """Return the number of processes that train."""
    processes = processes or Processes.this()
    if processes.launcher:
        return processes.count
    devices = settings.devices
    if devices in ("auto", -1, "-1"):
        return max(1, torch.cuda.device_count()) if accelerator in ("cuda", "gpu") else 1
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    return len(devices) if isinstance(devices, list | tuple) else int(devices)


def check_launcher(settings: TrainerSettings, processes: Processes) -> None:
    """Raise UserError for numbers of devices and machines that are not those of the launcher."""
    nodes = settings.other("num_nodes", 1)
    if processes.launcher is None:
        if nodes != 1:
            raise UserError(
                f"trainer.num_nodes={shown(nodes)} needs a launcher that starts this command on every machine; leave it out, and "
                "start it with torchrun or srun (docs/cluster.md)."
            )
        return
    if nodes not in (1, processes.num_machines):
        raise UserError(
            f"trainer.num_nodes={shown(nodes)}, but {processes.launcher} has started processes on {processes.num_machines} "
            "machines; leave it out."
        )
    if settings.devices not in (1, "auto", -1, processes.count_here):
        raise UserError(
            f"trainer.devices={shown(settings.devices)}, but {processes.launcher} has started {processes.count_here} processes "
            "on each machine; leave it out."
        )


def check_devices(processes: Processes, accelerator: str) -> None:
    """Raise UserError if a process has no GPU to train on."""
    count = torch.cuda.device_count()
    if accelerator in ("cuda", "gpu") and count < processes.count_here:
        option = "--nproc-per-node" if processes.launcher == "torchrun" else "--ntasks-per-node"
        raise UserError(
            f"{processes.launcher} has started {processes.count_here} processes on this machine, and each sees {count} GPUs; "
            f"start one process per GPU ({option}={count}), and let every process see all of them "
            f"(srun --gres=gpu:{processes.count_here}, not --gpus-per-task)."
        )
