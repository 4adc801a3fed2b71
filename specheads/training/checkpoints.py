"""A Lightning callback that makes training resumable with the same results, and forecasts the remaining time.

A checkpoint is written between two steps, never between an epoch's last step and its validation: a run that resumes there would
skip the validation. It holds the provenance of the run, so that no run of other settings resumes from it.
"""

import os
import signal
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch

from specheads import interrupts
from specheads.errors import UserError
from specheads.forecast import Forecast
from specheads.interrupts import Interrupted, Request
from specheads.storage.files import temporary_of


class Checkpoints(L.Callback):
    """Writes `path` every so many optimiser steps, at the end of every epoch, and when the run is asked to stop by `request`."""

    def __init__(self, path: Path, every_steps: int, provenance: Mapping[str, Any]) -> None:
        self.path, self.every_steps, self.provenance = path, every_steps, dict(provenance)
        self.request = Request()
        self.saved_step = 0
        self.earlier_seconds = 0.0
        self.start = time.perf_counter()
        self.forecast, self.validation = Forecast("training, without validation"), Forecast("validation")

    @property
    def seconds(self) -> float:
        """The training time so far, in all sessions."""
        return self.earlier_seconds + time.perf_counter() - self.start

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Let a run with max_steps resume like others: Lightning skips the epoch after one whose end was saved."""
        trainer.fit_loop._iteration_based_training = lambda: False

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.start = time.perf_counter()
        interrupts.listen_again(self.request)  # Lightning has replaced our SIGTERM handler

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Count the last epoch where its end was saved and no step is left: Lightning counts it only by max_epochs."""
        progress = trainer.fit_loop.epoch_progress.current
        progress.completed = max(progress.completed, progress.processed)

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.validation = Forecast("validation")

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int, loader: int = 0
    ) -> None:
        self.validation.update(index + 1, sum(trainer.num_val_batches))

    def on_test_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        interrupts.listen_again(self.request)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int) -> None:
        self.forecast.update(trainer.global_step, trainer.estimated_stepping_batches)
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

    def on_test_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.end_if(self.is_asked(trainer))

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"provenance": self.provenance, "seconds": self.seconds}

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.saved_step, self.earlier_seconds = checkpoint["global_step"], checkpoint["seconds"]

    def is_asked(self, trainer: L.Trainer) -> bool:
        """Whether any process of the run got a signal; all processes get the same answer."""
        return trainer.strategy.reduce_boolean_decision(self.request.number is not None, all=False)

    def end_if(self, asked: bool) -> None:
        if asked:
            raise Interrupted(self.request.number or signal.SIGTERM)

    def save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint, in which every process takes part. Raises UserError for weights that are NaN or infinite."""
        weights = [weight for weight in trainer.lightning_module.parameters() if weight.requires_grad]
        if not all(bool(weight.isfinite().all()) for weight in weights):  # as they are from the step on whose loss was
            raise UserError(
                f"the weights are NaN or infinite after step {trainer.global_step}, so nothing is saved: the loss was no finite "
                "number in this step or before. Use a smaller optimizer.lr=, or trainer.precision=32-true; the curves show when "
                "it began."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for logger in trainer.loggers:
            logger.save()
        trainer.save_checkpoint(temporary_of(self.path), weights_only=False)
        if trainer.is_global_zero:
            os.replace(temporary_of(self.path), self.path)
        trainer.strategy.barrier()
        self.saved_step = trainer.global_step


def differences(checkpoint: Path, provenance: Mapping[str, Any]) -> list[str]:
    """Return the entries in which a checkpoint's provenance differs. Raises UserError for a file that is damaged or another."""
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            if damaged := archive.testzip():  # torch does not compare the checksums that it writes
                raise ValueError(f"{damaged} in it is damaged")
        saved = torch.load(checkpoint, mmap=True, weights_only=True, map_location="cpu")["provenance"]
        if not isinstance(saved, dict):
            raise TypeError("no provenance")
    except Exception as error:  # noqa: BLE001 - torch and zipfile raise a dozen kinds
        raise UserError(
            f"{checkpoint} is not a checkpoint that can be resumed ({type(error).__name__}); expected the one that the "
            "interrupted run wrote."
        ) from None
    return sorted(name for name in saved.keys() | provenance.keys() if saved.get(name) != provenance.get(name))
