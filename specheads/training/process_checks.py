"""How many processes train, and whether settings fit them: known before anything is loaded."""

import torch

from specheads.errors import UserError
from specheads.processes import Processes
from specheads.settings import shown
from specheads.training.trainer_settings import Loader, TrainerSettings


def check_processes(settings: TrainerSettings, loader: Loader) -> None:
    """Raise UserError for settings that contradict the launcher, and batches that the processes cannot share."""
    check_launcher(settings, Processes.this())
    check_batches(loader.batch_size, num_processes(settings, settings.accelerator))


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
                "start it with torchrun or srun (docs/machines.md)."
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


def check_batches(batch_size: int, num_processes: int) -> None:
    """Raise UserError for batches that cannot be split over the processes."""
    if batch_size % num_processes:
        raise UserError(
            f"loader.batch_size={batch_size} rows cannot be split over {num_processes} processes; give a multiple of "
            f"{num_processes}, for example loader.batch_size={-(-batch_size // num_processes) * num_processes}, or another "
            "number of processes."
        )
