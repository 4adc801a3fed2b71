"""What every training shares: its optimiser, its loss over a whole step, its curves, the trainer, and which checkpoint it may resume."""

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import wandb
from hydra.utils import instantiate
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from specheads.commands.loggers import new_logger
from specheads.errors import UserError, is_count, is_number
from specheads.storage.runs import is_resumed
from specheads.training.checkpoints import Checkpoints, TimeToGo, differences

logger = logging.getLogger(__name__)

# What the trainer may be told and would not be resumed exactly, or not at all; a missing key has the value that fits.
UNFIT = {
    "num_nodes": ("training runs on one machine", lambda value: value == 1),
    "val_check_interval": (
        "a number of steps or a share of an epoch can be resumed",
        lambda value: value is None or is_number(value),
    ),
    "check_val_every_n_epoch": ("a count of epochs can be resumed", lambda value: is_count(value, least=1)),
    "reload_dataloaders_every_n_epochs": ("the data stays the same from epoch to epoch", lambda value: value == 0),
}
WHERE_TO_TRAIN = ("_target_", "accelerator", "devices", "default_root_dir")  # trainer keys that change no number
LR_TIMES_WIDTH = 0.16  # the learning rate that was best for nano's draft, times its width; updates of wider layers add up
CHATTER = (  # what Lightning says about itself
    ".*does not have many workers.*",
    ".*LeafSpec.*",
    ".*sync_dist=True.*",  # what we log was gathered from all processes
    ".*logs directory .* exists and is not empty.*",
)


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with a linear warm-up and a cosine to zero (SpecDec++, appendix); `lr` None: what suits a model's width."""

    lr: float | None = 5e-5
    weight_decay: float = 0.01
    warmup_share: float = 0.03

    def __post_init__(self) -> None:
        if self.lr is not None and (not is_number(self.lr) or self.lr <= 0):
            raise UserError(f"optimizer.lr={self.lr} is not above 0; use for example 1e-3.")
        if not is_number(self.weight_decay) or self.weight_decay < 0:
            raise UserError(f"optimizer.weight_decay={self.weight_decay} is no number of at least 0.")
        if not is_number(self.warmup_share) or not 0 <= self.warmup_share <= 1:
            raise UserError(f"optimizer.warmup_share={self.warmup_share} is outside [0, 1]; it is a share of the steps.")

    def for_width(self, width: int) -> "OptimizerSettings":
        """Return the settings for a whole model whose hidden states have `width` numbers."""
        return replace(self, lr=LR_TIMES_WIDTH / width) if self.lr is None else self


def cosine_after_warmup(num_steps: int, warmup_share: float) -> Callable[[int], float]:
    """Return the learning rate's share of its peak by step."""
    warmup = max(1, math.ceil(num_steps * warmup_share))

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, num_steps - warmup))))

    return share


class CurveModule(L.LightningModule):
    """A module whose loss is a ratio of sums over a whole optimiser step, and whose curves are kept in its checkpoints.

    A step's loss is `sum of weighted losses / sum of weights` over all its batches and processes. The second sum is known only at the end
    of the step, so batches are divided by the weights of its first one, and gradients are put right before they are clipped.
    A log file may lag behind a checkpoint or be ahead of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[int, dict[str, float]]] = []
        self._sums: list[Tensor] = []  # of each batch of this step, over all processes (2, n + m), see `loss_of_batch`
        self._num_losses = 0

    def loss_of_batch(self, batch_index: int, losses: Tensor, weights: Tensor, measures: Tensor | None = None) -> Tensor:
        """Return what `training_step` is to return for a batch that has these sums.

        Args:
            losses, weights: (n,) sums of weighted losses and of weights. Each of the n has parameters of its own, or n is 1.
            measures: (2, m) sums and weights of what is recorded with the losses, but not learned from.
        """
        if batch_index % self.trainer.accumulate_grad_batches == 0:
            self._sums, self._num_losses = [], len(losses)
        sums = torch.stack([losses.detach(), weights])
        sums = sums if measures is None else torch.cat([sums, measures], dim=1)
        self._sums.append(self.all_gather(sums).reshape(-1, *sums.shape).sum(0))
        # Gradients are averaged over processes, so that losses are divided by the mean weights of one.
        return (losses / (self._first_weights() / self.trainer.world_size)).sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the gradients of a step of several batches right, and add its losses and measures to the curves."""
        sums, weights = torch.stack(self._sums).sum(0)
        weights = _or_one(weights)
        count = self.trainer.accumulate_grad_batches
        if count > 1:  # by which Lightning has divided every batch, also in an epoch's last step, which may have fewer
            self.scale_gradients(count * self._first_weights() / weights[: self._num_losses])
        values = sums / weights
        if self.global_step % self.trainer.log_every_n_steps == 0:
            self.record({f"train/{name}": value for name, value in self.named_values(values.tolist()).items()})
        self.log("loss", values[: self._num_losses].mean(), prog_bar=True, logger=False)

    def _first_weights(self) -> Tensor:
        return _or_one(self._sums[0][1, : self._num_losses])

    def scale_gradients(self, factors: Tensor) -> None:
        """Multiply the gradients of the parameters behind each loss by its factor (n,)."""
        raise NotImplementedError

    def named_values(self, values: Sequence[float]) -> dict[str, float]:
        """Return a step's losses and measures (n + m,) by their names."""
        raise NotImplementedError

    def record(self, metrics: dict[str, float], beforehand: bool = False) -> None:
        """Add a point to the curves, at the number of optimiser steps done; callbacks see it too, unless training has not begun."""
        self.history.append((self.global_step, {"epoch": self.current_epoch, **metrics}))
        for each in self.loggers:
            each.log_metrics(self.history[-1][1], self.global_step)
        if not beforehand:
            self.log_dict(metrics, logger=False)

    def log_history(self) -> None:
        """Write the curves of the run that this one goes on with; W&B keeps what it was given before the interruption."""
        for step, metrics in self.history:
            for each in self.loggers:
                if isinstance(each, CSVLogger):  # which starts its file anew
                    each.log_metrics(metrics, step)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.history = checkpoint["history"]


def _or_one(weights: Tensor) -> Tensor:
    """Return weights with 1 in place of 0: what has no weight in a batch or a step teaches nothing in it."""
    return torch.where(weights > 0, weights, 1.0)


def check_training(cfg: DictConfig) -> None:
    """Raise UserError for settings of trainer, batches, optimiser and checkpoints that cannot be."""
    counts = {key: cfg.trainer[name] for name in ("max_epochs", "log_every_n_steps") for key in [f"trainer.{name}"]}
    if "accumulate_grad_batches" in cfg.trainer:
        counts["trainer.accumulate_grad_batches"] = cfg.trainer.accumulate_grad_batches
    counts |= {"loader.batch_size": cfg.loader.batch_size, "checkpoint.every_steps": cfg.checkpoint.every_steps}
    for key, value in counts.items():
        check_positive(key, value)
    for key, (reason, fits) in UNFIT.items():
        if key in cfg.trainer and not fits(cfg.trainer[key]):
            raise UserError(f"trainer.{key}={cfg.trainer[key]} is not supported: {reason}; leave it out.")
    if unknown := sorted(set(cfg.loader) - {"batch_size", "num_workers"}):
        raise UserError(f"loader.{unknown[0]} is not known; loader takes batch_size and num_workers.")
    if not is_count(cfg.loader.num_workers):
        raise UserError(f"loader.num_workers={cfg.loader.num_workers} is no count; 0 reads the data in the training process.")
    instantiate(cfg.optimizer)


def check_positive(key: str, value: Any) -> None:
    """Raise UserError unless the value of a key is a count of at least 1."""
    if not is_count(value, least=1):
        raise UserError(f"{key}={value} is not a count of at least 1, and training needs one.")


@contextlib.contextmanager
def seeded_training(seed: int) -> Iterator[None]:
    """Seed everything that is drawn, keep back what Lightning says about itself, and close the W&B run that the block began."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    for message in CHATTER:
        warnings.filterwarnings("ignore", message)
    L.seed_everything(seed, workers=True, verbose=False)
    try:
        yield
    finally:
        wandb.finish()  # or the next training of this process would log into this one's run


def new_trainer(cfg: DictConfig, device_type: str) -> tuple[L.Trainer, Checkpoints]:
    """Return the trainer of a config, with its loggers, and what keeps its checkpoints.

    Args:
        device_type: where the models are, for `trainer.accelerator=auto`: they may have been put on a CPU, and Apple's has no float64.
    """
    run = Path(cfg.paths.run)
    loggers = [new_logger(logger_config, run) for logger_config in (cfg.get("logger") or {}).values()]
    checkpoints = Checkpoints(run / "checkpoints" / "last.ckpt", cfg.checkpoint.every_steps)
    trainer = instantiate(
        cfg.trainer,
        logger=loggers,
        callbacks=[checkpoints, TimeToGo(), RichProgressBar()],
        enable_checkpointing=False,
        plugins=[LightningEnvironment()],  # within a scheduler's job too, this process starts the others itself
        **({"accelerator": device_type} if cfg.trainer.accelerator == "auto" else {}),
    )
    if trainer.accumulate_grad_batches > 1 and trainer.strategy.handles_gradient_accumulation:
        raise UserError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} with trainer.strategy={cfg.trainer.get('strategy')}, which "
            "averages the batches of a step itself, however many tokens each has; use a larger loader.batch_size, or another strategy, "
            "for example +trainer.strategy=ddp."
        )
    return trainer, checkpoints


def trainer_settings(cfg: DictConfig) -> dict[str, str]:
    """Return the trainer's settings that decide numbers."""
    found = OmegaConf.to_container(cfg.trainer).items()
    return {f"trainer.{key}": str(value) for key, value in found if key not in WHERE_TO_TRAIN}


def checkpoint_to_resume(resume: bool | str, checkpoints: Checkpoints) -> Path | None:
    """Return the checkpoint to go on from: that of this folder's interrupted run, or the one that `resume` names."""
    path = checkpoints.path
    if path.is_file() and is_resumed(path.parents[1]):
        try:
            changed = differences(path, checkpoints.provenance)
            if not changed:
                return path
            logger.warning("starts anew: since %s was written, there are other %s", path, ", ".join(changed))
        except UserError as error:
            logger.warning("starts anew: %s", error)
    check_named_checkpoint(resume, checkpoints.provenance)
    return Path(resume) if isinstance(resume, str) else None


def check_named_checkpoint(resume: bool | str, provenance: Mapping[str, Any], but: Collection[str] = ()) -> None:
    """Raise UserError unless the checkpoint that `resume` names, if it names one, is of the same settings, leaving out `but`."""
    changed = [name for name in differences(Path(resume), provenance) if name not in but] if isinstance(resume, str) else []
    if changed:
        raise UserError(
            f"resume={resume} is of a run with other {', '.join(changed)}; give the same settings as that run had, "
            "or resume=false to start anew."
        )
