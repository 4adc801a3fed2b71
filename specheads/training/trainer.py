"""The trainer of a run, its seed, and the checkpoint that it may resume."""

import contextlib
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import Logger

from specheads.errors import UserError
from specheads.storage.runs import is_resumed
from specheads.training.checkpoints import Checkpoints, TimeToGo, differences
from specheads.training.placement import placement
from specheads.training.trainer_settings import Checkpointing, TrainerSettings

logger = logging.getLogger(__name__)

CHATTER = (  # Lightning's messages about itself
    ".*does not have many workers.*",
    ".*LeafSpec.*",
    ".*sync_dist=True.*",  # what we log was gathered from all processes
    ".*logs directory .* exists and is not empty.*",
    ".*smaller than the logging interval.*",  # of few prompts
    ".*functional.all_gather is deprecated.*",
)


@contextlib.contextmanager
def seeded_training(seed: int) -> Iterator[None]:
    """Seed all random generators, and hide Lightning's messages about itself."""
    for name in ("pytorch.utilities.rank_zero", "fabric.utilities.distributed"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.WARNING)
    for message in CHATTER:
        warnings.filterwarnings("ignore", message)
    L.seed_everything(seed, workers=True, verbose=False)
    yield


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
    settings: TrainerSettings, checkpointing: Checkpointing, run: Path, loggers: Sequence[Logger], device_type: str
) -> tuple[L.Trainer, Checkpoints]:
    """Return a trainer, and the callback that writes its checkpoints into the folder of the run.

    Args:
        device_type: the device of the models, for `trainer.accelerator=auto`: they may be on a CPU, and Apple's GPUs have no
            float64.

    Raises:
        UserError: see `placement`; batches are accumulated under a strategy that averages them itself.
    """
    checkpoints = Checkpoints(run / "checkpoints" / "last.ckpt", checkpointing.every_steps)
    arguments = settings.arguments() | placement(settings, device_type)
    trainer = L.Trainer(
        **arguments,
        default_root_dir=str(run),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # EpochSampler splits rows over processes
        enable_model_summary=False,
        logger=list(loggers),
        callbacks=[checkpoints, TimeToGo(), RichProgressBar()],
        enable_checkpointing=False,
    )
    if trainer.accumulate_grad_batches > 1 and trainer.strategy.handles_gradient_accumulation:
        raise UserError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} with "
            f"trainer.strategy={settings.other('strategy')}, which averages the batches of a step itself, however many tokens "
            "each has; use a larger loader.batch_size, or another strategy, for example +trainer.strategy=ddp."
        )
    return trainer, checkpoints


def checkpoint_to_resume(resume: bool | str, checkpoints: Checkpoints) -> Path | None:
    """Return the checkpoint to resume: that of this folder's interrupted run, or the one that `resume` names."""
    path = checkpoints.path
    if path.is_file() and is_resumed(path.parents[1]):
        try:
            changed = differences(path, checkpoints.provenance)
            if not changed:
                return path
            logger.warning("training starts again: %s was written with another %s", path, ", ".join(changed))
        except UserError as error:
            logger.warning("training starts again: %s", error)
    check_named_checkpoint(resume, checkpoints.provenance)
    return Path(resume) if isinstance(resume, str) else None


def check_named_checkpoint(resume: bool | str, provenance: Mapping[str, Any], but: Collection[str] = ()) -> None:
    """Raise UserError unless the checkpoint that `resume` names, if it names one, is of the same settings, leaving out `but`."""
    changed = [name for name in differences(Path(resume), provenance) if name not in but] if isinstance(resume, str) else []
    if changed:
        raise UserError(
            f"resume={resume} is of a run with another {', '.join(changed)}; give the same settings as that run had, "
            "or resume=false to start again."
        )
