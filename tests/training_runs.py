"""Trainings in tests: a trainer that says nothing, and a callback that kills a run at one of its
moments.
"""

import lightning as L
from lightning.pytorch.loggers import CSVLogger


def quiet_trainer(folder, max_epochs=3, **changes):
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(max_epochs=max_epochs, default_root_dir=folder, **settings | changes)


def with_curves(folder):
    """Arguments of a trainer that writes every step into a file."""
    return {"logger": CSVLogger(folder, name="csv", version=""), "log_every_n_steps": 1}


def curves_of(folder):
    return (folder / "csv" / "metrics.csv").read_text()


class Killed(BaseException):
    """What kill -9 is in these tests: nothing that the run could catch comes after it."""


class KillAt(L.Callback):
    """Ends the run at the n-th moment of its life, or asks it to end."""

    def __init__(self, moment, request=None):
        self.moment = moment
        self.request = request
        self.count = 0

    def tick(self, *args, **kwargs):
        self.count += 1
        if self.count == self.moment and self.request is None:
            raise Killed
        if self.count == self.moment:
            self.request.number = 2

    on_train_batch_start = on_before_optimizer_step = on_train_batch_end = tick
    on_validation_batch_end = on_validation_end = on_train_epoch_end = on_train_end = (
        on_test_batch_end
    ) = tick
