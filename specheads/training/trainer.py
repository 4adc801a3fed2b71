"""The trainer of a run, its seed, its place on processes and devices, and the checkpoint that it may resume."""

import atexit
import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed import PrefixStore, rendezvous

from specheads.errors import UserError
from specheads.processes import Processes
from specheads.storage.runs import is_resumed
from specheads.training.checkpoints import Checkpoints, differences
from specheads.training.settings import TrainerSettings, Training, check_launcher, num_processes

logger = logging.getLogger(__name__)

CHATTER = (  # Lightning's messages about itself
    ".*does not have many workers.*",
    ".*LeafSpec.*",
    ".*sync_dist=True.*",  # what we log was gathered from all processes
    ".*logs directory .* exists and is not empty.*",
    ".*smaller than the logging interval.*",  # few prompts cause it
    ".*functional.all_gather is deprecated.*",
)


@contextlib.contextmanager
def fast_products(precision: str, device_type: str) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32 while the block runs, if `precision` is half anyway."""
    before = torch.get_float32_matmul_precision()
    if device_type == "cuda" and precision != "32-true":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def new_trainer(
    settings: Training,
    run: Path,
    loggers: Sequence[Logger],
    device_type: str,
    provenance: Mapping[str, Any],
    checkpoint: str = "last",
) -> tuple[L.Trainer, Checkpoints]:
    """Seed all random generators; return a trainer, and the callback that writes its checkpoints into the folder of the run.

    `device_type` is that of the models, for `trainer.accelerator=auto`; `provenance` decides the numbers of the run.

    Raises:
        UserError: as of `placement`; batches that cannot be split, or are accumulated under a strategy that averages them itself.
    """
    for name in ("pytorch.utilities.rank_zero", "fabric.utilities.distributed"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.WARNING)
    for message in CHATTER:
        warnings.filterwarnings("ignore", message)
    L.seed_everything(settings.seed, workers=True, verbose=False)
    checkpoints = Checkpoints(run / "checkpoints" / f"{checkpoint}.ckpt", settings.checkpoint_steps, provenance)
    trainer = L.Trainer(
        **settings.trainer.values() | placement(settings.trainer, device_type, Processes.this()),
        default_root_dir=str(run),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # EpochSampler splits rows over processes
        enable_model_summary=False,
        logger=list(loggers),
        callbacks=[checkpoints, RichProgressBar()],
        enable_checkpointing=False,
    )
    if trainer.accumulate_grad_batches > 1 and trainer.strategy.handles_gradient_accumulation:
        raise UserError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} with "
            f"trainer.strategy={settings.trainer.other('strategy')}, which averages the batches of a step itself, however many "
            "tokens each has; use a larger loader.batch_size, or another strategy, for example +trainer.strategy=ddp."
        )
    settings.check_processes(trainer.world_size)
    return trainer, checkpoints


def checkpoint_to_resume(checkpoints: Checkpoints) -> Path | None:
    """Return the checkpoint of this folder's interrupted run; None, with a warning, where it is of other settings or damaged."""
    path = checkpoints.path
    if not (path.is_file() and is_resumed(path.parents[1])):
        return None
    try:
        if changed := differences(path, checkpoints.provenance):
            logger.warning("training starts again: %s was written with another %s", path, ", ".join(changed))
    except UserError as error:
        logger.warning("training starts again: %s", error)
        return None
    return None if changed else path


FSDP2 = "fsdp2"  # our name for a strategy that Lightning has no name for


class SrunEnvironment(SLURMEnvironment):
    """SLURM's variables of a step, which may have fewer processes and machines than its job."""

    def world_size(self) -> int:
        return Processes.this().count

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass  # the numbers are those of `Processes`


def placement(settings: TrainerSettings, device_type: str, processes: Processes) -> dict[str, Any]:
    """Return the arguments of lightning.Trainer that say where it trains. Raises UserError where the launcher is against it."""
    accelerator = device_type if settings.accelerator == "auto" else settings.accelerator
    check_launcher(settings, processes)
    if processes.launcher is None:
        # Within a scheduler's job too, this process starts the others itself.
        arguments = {"devices": settings.devices, "plugins": [LightningEnvironment()]}
    else:
        _check_devices(processes, accelerator)
        _join_again(processes, accelerator)
        # A run by srun that is started again resumes from its own checkpoint.
        where = TorchElasticEnvironment() if processes.launcher == "torchrun" else SrunEnvironment(auto_requeue=False)
        arguments = {"devices": processes.count_here, "num_nodes": processes.num_machines, "plugins": [where]}
    if settings.other("strategy") == FSDP2:
        if settings.precision == "16-mixed":
            raise UserError(
                "trainer.precision=16-mixed with trainer.strategy=fsdp2: gradients that are spread over processes cannot be "
                "scaled; use trainer.precision=bf16-mixed or 32-true."
            )
        size = num_processes(settings, accelerator, processes)
        arguments["strategy"] = ModelParallelStrategy(size, tensor_parallel_size=1, save_distributed_checkpoint=False)
    return arguments | {"accelerator": accelerator}


def _check_devices(processes: Processes, accelerator: str) -> None:
    """Raise UserError if a process has no GPU to train on."""
    count = torch.cuda.device_count()
    if accelerator in ("cuda", "gpu") and count < processes.count_here:
        option = "--nproc-per-node" if processes.launcher == "torchrun" else "--ntasks-per-node"
        raise UserError(
            f"{processes.launcher} has started {processes.count_here} processes on this machine, and each sees {count} GPUs; "
            f"start one process per GPU ({option}={count}), and let every process see all of them "
            f"(srun --gres=gpu:{processes.count_here}, not --gpus-per-task)."
        )


def _join_again(processes: Processes, accelerator: str) -> None:
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
