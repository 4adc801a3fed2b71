"""Lightning callbacks that make a training run resumable to the same numbers, and one that says how long it will take.

A checkpoint is written between two steps, never between an epoch's last step and its validation: going on from there would
skip the validation. What is being trained is written into it, so that it is not taken for another run's.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch

from specheads.errors import UserError
from specheads.files import write_whole
from specheads.forecast import Forecast
from specheads.interrupts import Request


class Checkpoints(L.Callback):
    """Writes `path` every so many optimiser steps, at the end of every epoch, and when the run is asked to stop.

    `made_of` and `request` are set before training starts.
    """

    def __init__(self, path: Path, every_steps: int) -> None:
        self.path, self.every_steps = path, every_steps
        self.made_of: dict[str, Any] = {}
        self.request = Request()
        self.saved_step = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int) -> None:
        if index + 1 >= trainer.num_training_batches:
            return  # the epoch's end saves, after the validation
        due = trainer.global_step >= self.saved_step + self.every_steps
        if due or self.request.number is not None:
            self.save(trainer)
        self.request.obey()

    def on_validation_batch_end(self, *args: Any) -> None:
        self.request.obey()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.save(trainer)
        self.request.obey()

    def on_test_batch_end(self, *args: Any) -> None:
        self.request.obey()

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["made_of"] = self.made_of

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.saved_step = checkpoint["global_step"]

    def save(self, trainer: L.Trainer) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for each in trainer.loggers:
            each.save()
        write_whole(self.path, trainer.save_checkpoint)
        self.saved_step = trainer.global_step


class TimeToGo(L.Callback):
    """Says in the log how long the training will take."""

    def __init__(self) -> None:
        self.forecast = Forecast("training, without validation")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.forecast.update(trainer.global_step, trainer.estimated_stepping_batches)


def differences(checkpoint: Path, made_of: Mapping[str, Any]) -> list[str]:
    """Return the names of what a checkpoint was made of that differs from `made_of`.

    Raises:
        UserError: the file cannot be read as a checkpoint of train.py.
    """
    try:
        found = torch.load(checkpoint, mmap=True, weights_only=True, map_location="cpu")["made_of"]
    except (OSError, RuntimeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(
            f"{checkpoint} is no checkpoint that train.py can go on from ({type(error).__name__}); expected "
            "outputs/<task>/<date_time>/checkpoints/last.ckpt of an earlier run, or resume=false to start anew."
        ) from None
    return sorted(name for name in found.keys() | made_of.keys() if found.get(name) != made_of.get(name))
