"""The settings of every training except its optimizer: batches, checkpoints and the arguments of lightning.Trainer."""

import inspect
from typing import Any

from pydantic import ConfigDict

from specheads.errors import UserError
from specheads.settings import (
    Count,
    NonNegativeNumber,
    Number,
    PositiveCount,
    Settings,
    cache_key,
    model_validator,
    setting,
    shown,
)

WHERE = ("num_nodes", "strategy")  # other arguments that say where a run trains, and not what it computes
# Arguments that no command line gives.
MADE_HERE = (
    *("logger", "callbacks", "plugins", "enable_checkpointing", "enable_model_summary", "default_root_dir"),
    *("num_sanity_val_steps", "use_distributed_sampler", "reload_dataloaders_every_n_epochs"),
)


class Loader(Settings):
    """How batches are loaded."""

    batch_size: PositiveCount = setting(32, "the number of rows per batch, of all processes together: each takes an equal part")
    num_workers: Count = setting(
        0, "the number of processes that load batches; 0: the training process loads them itself", decides=False
    )


class Checkpointing(Settings):
    """When checkpoints are written."""

    every_steps: PositiveCount = setting(
        200, "the number of optimizer steps between two checkpoints; one more is written at the end of every epoch", decides=False
    )


class TrainerSettings(Settings):
    """Arguments of lightning.Trainer: these, and any other but the logger and the callbacks."""

    model_config = ConfigDict(extra="allow")

    max_epochs: PositiveCount = setting(12, "the number of passes over the train prompts")
    accelerator: Any = setting("auto", "where to train: cpu, gpu, ...; auto: where the models are", decides=False)
    devices: Any = setting(
        1,
        "the number of devices of a machine, which share every batch; auto: all devices; with torchrun or srun it is the number "
        "of processes that they start on each",
        decides=False,
    )
    precision: Any = setting(
        "32-true",
        "the precision of the arithmetic; heads always compute in float32, and the draft that they read keeps its dtype",
    )
    gradient_clip_val: NonNegativeNumber | None = setting(1.0, "the largest norm of a step's gradient; null: no limit")
    accumulate_grad_batches: PositiveCount = setting(
        1, "the number of batches per optimizer step; all of their positions have equal weights"
    )
    check_val_every_n_epoch: PositiveCount = setting(1, "the number of epochs between two validations")
    val_check_interval: Number | None = setting(
        None, "the number of steps, or the share of an epoch, between two validations; null: validate at the end of an epoch"
    )
    log_every_n_steps: PositiveCount = setting(10, "the number of optimizer steps between two lines in the logs")

    @model_validator(mode="after")
    def check_other_arguments(self) -> "TrainerSettings":
        """Refuse arguments that lightning.Trainer does not know, or that are made here."""
        if others := self.model_extra or {}:
            from lightning import Trainer  # slow to import, and needed only to know its arguments

            known = [name for name in inspect.signature(Trainer).parameters if name not in MADE_HERE]
            if unknown := [name for name in others if name not in known]:
                raise UserError(
                    f"trainer.{unknown[0]}={shown(others[unknown[0]])} is not known; expected an argument of lightning.Trainer: "
                    f"{', '.join(known)}."
                )
        return self

    def other(self, name: str, default: Any = None) -> Any:
        """Return an argument of lightning.Trainer that is no field of these settings."""
        return (self.model_extra or {}).get(name, default)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of lightning.Trainer."""
        return self.values()

    def cache_key(self) -> dict[str, Any]:
        """Return the arguments that decide numbers, by their keys on the command line; how many processes compute does not."""
        where = {f"trainer.{name}" for name in WHERE}
        return {key: value for key, value in cache_key(self, "trainer").items() if key not in where}
