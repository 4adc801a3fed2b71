"""The trainer of a run, its seed, its place on processes and devices, and the checkpoints from
which it resumes.
"""

import atexit
import contextlib
import logging
import os
import signal
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import PrefixStore, rendezvous

from specheads import interrupts
from specheads.errors import UserError
from specheads.interrupts import Interrupted, Request
from specheads.processes import Processes
from specheads.progress import Advance, progress
from specheads.storage.files import temporary_of, write_whole
from specheads.storage.runs import is_resumed
from specheads.training.curve_module import CurveModule
from specheads.training.settings import TrainerSettings, Training, check_launcher, named_processes

logger = logging.getLogger(__name__)

FSDP2 = "fsdp2"  # our name for a strategy that Lightning has no name for
CHATTER = (  # Lightning's messages about itself
    ".*LeafSpec.*",
    ".*sync_dist=True.*",  # what we log was gathered from all processes
    ".*logs directory .* exists and is not empty.*",
    ".*smaller than the logging interval.*",  # few prompts cause it
    ".*functional.all_gather is deprecated.*",
)


class Best(NamedTuple):
    """When a model did best on dev prompts, and by how much: the smaller the value, the better."""

    value: float
    epoch: int
    step: int


class Checkpoints(L.Callback):
    """Writes `path` every so many optimiser steps, at the end of every epoch, and when the run is
    asked to stop by `request`; next to it the weights that were best on dev prompts.
    """

    def __init__(self, path: Path, every_steps: int, provenance: Mapping[str, object]) -> None:
        self.path = path
        self.every_steps = every_steps
        self.provenance = dict(provenance)
        self.request = Request()
        self.saved_step = 0
        self.best: dict[str, Best] = {}  # by trained model
        self.earlier_seconds = 0.0
        self.start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The training time so far, in all sessions."""
        return self.earlier_seconds + time.perf_counter() - self.start

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Let a run with max_steps resume like others: Lightning skips the epoch after one whose
        end was saved.
        """
        trainer.fit_loop._iteration_based_training = lambda: False

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.start = time.perf_counter()
        interrupts.listen_again(self.request)  # Lightning has replaced our SIGTERM handler

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Count the last epoch where its end was saved and no step is left: Lightning counts it
        only by max_epochs.
        """
        progress = trainer.fit_loop.epoch_progress.current
        progress.completed = max(progress.completed, progress.processed)

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.ckpt_path is None and trainer.is_global_zero:
            self.best_weights.unlink(missing_ok=True)  # an earlier training's

    @property
    def best_weights(self) -> Path:
        """The file of the best weights; tensors are named by model and parameter."""
        return self.path.with_suffix(".best.safetensors")

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Keep the weights of models that are better on dev prompts than after earlier epochs."""
        assert isinstance(module, CurveModule)
        better = []
        for name, value in module.dev_values.items():
            best = self.best.get(name)
            if best is None or not best.value <= value:  # what is NaN is not the best
                self.best[name] = Best(value, trainer.current_epoch, trainer.global_step)
                better.append(name)
        if not better:
            return
        weights = module.trained_weights(better)  # gathered from all processes
        if trainer.is_global_zero:
            self.best_weights.parent.mkdir(parents=True, exist_ok=True)
            kept = load_file(self.best_weights) if self.best_weights.exists() else {}
            for name, of_model in weights.items():
                for key, weight in of_model.items():
                    kept[f"{name}/{key}"] = weight.detach().cpu().contiguous()
            write_whole(self.best_weights, lambda path: save_file(_without_copies(kept), path))
        trainer.strategy.barrier()

    def read_best(self, trainer: L.Trainer) -> dict[str, dict[str, Tensor]]:
        """Return the best weights by model and parameter, in all processes; empty where no epoch
        was measured.
        """
        weights: dict[str, dict[str, Tensor]] = {name: {} for name in self.best}
        if self.best and trainer.is_global_zero:
            for place, weight in load_file(self.best_weights).items():
                name, _, key = place.rpartition("/")
                if name in weights:
                    weights[name][key] = weight
        return trainer.strategy.broadcast(weights)

    def on_test_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        interrupts.listen_again(self.request)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        outputs: object,
        batch: object,
        index: int,
    ) -> None:
        stop = self.is_asked(trainer)  # by all processes in every step
        if index + 1 >= trainer.num_training_batches or (index + 1) % trainer.val_check_batch == 0:
            return  # a validation comes first; the epoch's end, or the next step, saves
        if (index + 1) % trainer.accumulate_grad_batches:
            return  # half a step's gradients are in no checkpoint
        if stop or trainer.global_step >= self.saved_step + self.every_steps:
            self.save(trainer)
        self.end_if(stop)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        stop = self.is_asked(trainer)
        self.save(trainer)
        self.end_if(stop)

    def on_test_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        self.end_if(self.is_asked(trainer))

    def on_save_checkpoint(
        self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        best = {name: tuple(best) for name, best in self.best.items()}
        checkpoint |= {"provenance": self.provenance, "seconds": self.seconds, "best": best}

    def on_load_checkpoint(
        self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.saved_step = checkpoint["global_step"]
        self.earlier_seconds = checkpoint["seconds"]
        self.best = {name: Best(*best) for name, best in checkpoint.get("best", {}).items()}

    def is_asked(self, trainer: L.Trainer) -> bool:
        """Whether any process of the run got a signal; all processes get the same answer."""
        return trainer.strategy.reduce_boolean_decision(self.request.number is not None, all=False)

    def end_if(self, asked: bool) -> None:
        if asked:
            raise Interrupted(self.request.number or signal.SIGTERM)

    def save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint, in which every process takes part.

        Raises UserError for weights that are NaN or infinite, as after a loss that was.
        """
        for weight in trainer.lightning_module.parameters():
            if weight.requires_grad and not bool(weight.isfinite().all()):
                raise UserError(
                    f"the weights are NaN or infinite after step {trainer.global_step}, so nothing"
                    " is saved; use a smaller optimizer.lr=, or trainer.precision=32-true."
                )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for logger in trainer.loggers:
            logger.save()
        try:
            trainer.save_checkpoint(temporary_of(self.path), weights_only=False)
        except OSError:
            temporary_of(self.path).unlink(missing_ok=True)  # a full disk needs the space
            raise
        if trainer.is_global_zero:
            os.replace(temporary_of(self.path), self.path)
        trainer.strategy.barrier()
        self.saved_step = trainer.global_step


class ShownSteps(L.Callback):
    """Shows how many optimiser steps, and then how many test batches, are done."""

    def __init__(self) -> None:
        self._shown = contextlib.ExitStack()
        self._advance: Advance = lambda count: None
        self._steps = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._show("training", trainer.estimated_stepping_batches)
        self._steps = 0
        self._count(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        self._count(trainer)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._shown.close()

    def on_test_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._show("test prompts", sum(trainer.num_test_batches))

    def on_test_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        self._advance(1)

    def on_test_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._shown.close()

    def on_exception(self, trainer: L.Trainer, *args: object) -> None:
        self._shown.close()

    def _show(self, what: str, total: float) -> None:
        if Processes.this().is_first:
            self._advance = self._shown.enter_context(progress(what, total))

    def _count(self, trainer: L.Trainer) -> None:
        self._advance(trainer.global_step - self._steps)
        self._steps = trainer.global_step


def _without_copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without those that are another's memory, as tied weights are."""
    kept: dict[int, str] = {}
    for name, weight in weights.items():
        kept.setdefault(weight.data_ptr() if weight.numel() else -len(kept), name)
    return {name: weights[name] for name in kept.values()}


def differences(checkpoint: Path, provenance: Mapping[str, object]) -> list[str]:
    """Return the entries in which a checkpoint's provenance differs.

    Raises what torch, zipfile or a dict raises for a file that is damaged or another.
    """
    with zipfile.ZipFile(checkpoint) as archive:
        if damaged := archive.testzip():  # torch does not compare the checksums that it writes
            raise ValueError(f"{damaged} in it is damaged")
    content = torch.load(checkpoint, mmap=True, weights_only=True, map_location="cpu")
    saved = dict(content["provenance"])
    names = sorted(saved.keys() | provenance.keys())
    return [name for name in names if saved.get(name) != provenance.get(name)]


@contextlib.contextmanager
def fast_products(precision: str, device_type: str) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32 while the block runs, if `precision` is half
    anyway.
    """
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
    provenance: Mapping[str, object],
    checkpoint: str = "last",
) -> tuple[L.Trainer, Checkpoints]:
    """Seed all random generators.

    Return a trainer, and the callback that writes its checkpoints into the folder of the run.

    `device_type` is that of the models, for `trainer.accelerator=auto`. Raises UserError as
    `placement`, and for batches that cannot be split, or are accumulated under a strategy that
    averages them itself.
    """
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities.distributed").setLevel(logging.WARNING)
    for message in CHATTER:
        warnings.filterwarnings("ignore", message)
    L.seed_everything(settings.seed, workers=True, verbose=False)
    path = run / "checkpoints" / f"{checkpoint}.ckpt"
    checkpoints = Checkpoints(path, settings.checkpoint_steps, provenance)
    trainer = L.Trainer(
        **settings.trainer.values() | placement(settings.trainer, device_type, Processes.this()),
        default_root_dir=str(run),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # `Batches` splits rows over processes
        enable_model_summary=False,
        logger=list(loggers),
        enable_progress_bar=False,
        callbacks=[checkpoints, ShownSteps()],
        enable_checkpointing=False,
    )
    if trainer.accumulate_grad_batches > 1 and trainer.strategy.handles_gradient_accumulation:
        raise UserError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}:"
            f" trainer.strategy={settings.trainer.other('strategy')} averages batches of unequal"
            " lengths; use a larger loader.batch_size, or +trainer.strategy=ddp."
        )
    settings.check_processes(trainer.world_size)
    return trainer, checkpoints


def checkpoint_to_resume(checkpoints: Checkpoints) -> Path | None:
    """Return the checkpoint of this folder's interrupted run.

    None, with a warning, where it is of other settings or damaged.
    """
    path = checkpoints.path
    if not (path.is_file() and is_resumed(path.parents[1])):
        return None
    try:
        changed = differences(path, checkpoints.provenance)
    except Exception as error:  # noqa: BLE001 - torch and zipfile raise a dozen kinds
        logger.warning("training starts again: %s cannot be read (%s)", path, error)
        return None
    if not changed:
        return path
    names = ", ".join(changed)
    logger.warning("training starts again: %s was written with another %s", path, names)
    return None


class SrunEnvironment(SLURMEnvironment):
    """SLURM's variables of a step, which may have fewer processes and machines than its job."""

    def world_size(self) -> int:
        return Processes.this().count

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass  # the numbers are those of `Processes`


def placement(
    settings: TrainerSettings, device_type: str, processes: Processes
) -> dict[str, object]:
    """Return the arguments of lightning.Trainer that say where it trains.

    Raises UserError where the launcher is against it.
    """
    accelerator = device_type if settings.accelerator == "auto" else settings.accelerator
    check_launcher(settings, processes)
    arguments: dict[str, object] = {"accelerator": accelerator}
    if processes.launcher is None:
        # Within a scheduler's job too, this process starts the others itself.
        arguments["devices"] = settings.devices
        arguments["plugins"] = [LightningEnvironment()]
    else:
        _join_again(processes, accelerator)
        arguments["devices"] = processes.count_here
        arguments["num_nodes"] = processes.num_machines
        if processes.launcher == "torchrun":
            arguments["plugins"] = [TorchElasticEnvironment()]
        else:  # a run by srun that is started again resumes from its own checkpoint
            arguments["plugins"] = [SrunEnvironment(auto_requeue=False)]
    if settings.other("strategy") == FSDP2:
        if settings.precision == "16-mixed":
            raise UserError(
                "trainer.precision=16-mixed with trainer.strategy=fsdp2 cannot scale gradients; use"
                " trainer.precision=bf16-mixed or 32-true."
            )
        arguments["strategy"] = ModelParallelStrategy(
            num_processes(settings, accelerator, processes),
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
        )
    return arguments


def num_processes(settings: TrainerSettings, accelerator: str, processes: Processes) -> int:
    """Return the number of processes that train."""
    if settings.devices == "auto" and not processes.launcher and accelerator in ("cuda", "gpu"):
        return max(1, torch.cuda.device_count())
    return named_processes(settings, processes)


def _join_again(processes: Processes, accelerator: str) -> None:
    """Begin the process group of processes that torchrun has restarted, where there is none.

    Lightning would begin it in torchrun's store, which still has the addresses of the processes
    from before the restart.
    """
    if (
        not processes.restarts
        or processes.launcher != "torchrun"
        or torch.distributed.is_initialized()
    ):
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
