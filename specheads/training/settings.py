"""The settings that all trainings share: batches, optimizers, checkpoints, processes and the
arguments of lightning.Trainer.
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, PlainValidator, model_validator

from specheads.errors import UserError, is_count
from specheads.pair.generation_config import Warped
from specheads.processes import Processes
from specheads.settings import (
    NonNegativeNumber,
    PositiveCount,
    PositiveNumber,
    Probability,
    Seed,
    Settings,
    Text,
    cache_key,
    setting,
    shown,
    unknown_key,
)

# Other arguments that say where a run trains, and not what it computes.
WHERE = ("num_nodes", "strategy")
MADE_HERE = (  # arguments that no command line gives
    "logger",
    "callbacks",
    "plugins",
    "enable_checkpointing",
    "enable_model_summary",
    "enable_progress_bar",
    "default_root_dir",
    "num_sanity_val_steps",
    "use_distributed_sampler",
    "reload_dataloaders_every_n_epochs",
    "check_val_every_n_epoch",
)


def _devices(value: object) -> object:
    if value == "auto" or is_count(value, 1):
        return value
    numbers = value if isinstance(value, list) and all(map(is_count, value)) else []
    if numbers and len(set(numbers)) == len(numbers):
        return value
    raise ValueError(
        "must be a positive integer, auto, or a list of different numbers, as in [0,2]"
    )


Devices = Annotated[int | Literal["auto"] | list[int], PlainValidator(_devices)]


def _arguments_of_trainer() -> list[str]:
    """Return the names of lightning.Trainer's arguments, read in its source: its import takes
    seconds.
    """
    package = find_spec("lightning")
    assert package is not None and package.origin is not None
    source = Path(package.origin).with_name("pytorch") / "trainer" / "trainer.py"
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "Trainer":
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            made = next(each for each in methods if each.name == "__init__")
            return [each.arg for each in (*made.args.args[1:], *made.args.kwonlyargs)]
    raise AssertionError(f"{source} has no class Trainer")


class Loader(Settings):
    """How batches are loaded."""

    batch_size: PositiveCount = setting(
        32, "the number of rows per batch, of all processes together: each takes an equal part"
    )


class TrainerSettings(Settings):
    """Arguments of lightning.Trainer: these, and any other but the logger and the callbacks."""

    model_config = ConfigDict(extra="allow")

    max_epochs: PositiveCount = setting(12, "the number of passes over the train prompts")
    accelerator: Text = setting(
        "auto", "where to train: cpu, gpu, ...; auto: where the models are", decides=False
    )
    devices: Devices = setting(
        1,
        "the number of devices of a machine, which share every batch, or their numbers, [0,2];"
        " auto: all; torchrun and srun decide it themselves",
        decides=False,
    )
    precision: PositiveCount | Text = setting(
        "32-true",
        "the precision of the arithmetic; heads always compute in float32",
    )
    gradient_clip_val: NonNegativeNumber | None = setting(
        1.0, "the largest norm of a step's gradient; null: no limit"
    )
    accumulate_grad_batches: PositiveCount = setting(
        1, "the number of batches per optimizer step; all of their positions have equal weights"
    )
    log_every_n_steps: PositiveCount = setting(
        10, "the number of optimizer steps between two lines in the logs"
    )

    @model_validator(mode="after")
    def check_other_arguments(self) -> "TrainerSettings":
        """Refuse arguments that lightning.Trainer does not know, or that are made here."""
        if not self.model_extra:
            return self
        known = [name for name in _arguments_of_trainer() if name not in MADE_HERE]
        for name, value in self.model_extra.items():
            if name not in known:
                raise unknown_key(f"trainer.{name}", value, known)
        return self

    def other(self, name: str, default: object = None) -> object:
        """Return an argument of lightning.Trainer that is no field of these settings."""
        return (self.model_extra or {}).get(name, default)

    def cache_key(self) -> dict[str, object]:
        """Return the arguments that decide numbers, by their keys on the command line.

        How many processes compute does not.
        """
        values: dict[str, object] = cache_key(self, "trainer")
        for name in WHERE:
            values.pop(f"trainer.{name}", None)
        return values


class Optimizer(Settings):
    """AdamW with a linear warm-up and a cosine to zero (SpecDec++, appendix)."""

    lr: PositiveNumber = setting(3e-3, "AdamW's highest learning rate; it falls to 0 as a cosine")
    weight_decay: NonNegativeNumber = setting(0.01, "AdamW's weight decay; 0: none")
    warmup_share: Probability = setting(
        0.03, "the share of all steps in which the learning rate rises; 0: none"
    )


class Training(Warped):
    """What the settings of heads' training and of distillation have in common.

    Raises UserError for the first mistake.
    """

    seed: Seed = setting(0, "the seed of everything that is random")
    loader: Loader = setting(Loader(), "how batches are loaded")
    # See TrainerSettings.cache_key
    trainer: TrainerSettings = setting(
        TrainerSettings(), "the arguments of lightning.Trainer", decides=False
    )
    checkpoint_steps: PositiveCount = setting(
        200,
        "the number of optimizer steps between two checkpoints, besides those of every epoch",
        key="checkpoint.every_steps",
        decides=False,
    )

    def check_processes(self, count: int | None = None) -> None:
        """Raise UserError for settings that contradict the launcher, and for batches that `count`
        processes cannot share.
        """
        processes = Processes.this()
        batch_size = self.loader.batch_size
        check_launcher(self.trainer, processes)
        count = count or named_processes(self.trainer, processes)
        if batch_size % count:
            raise UserError(
                f"loader.batch_size={batch_size} rows cannot be split over {count} processes; give"
                f" a multiple of {count}."
            )


def named_processes(settings: TrainerSettings, processes: Processes) -> int:
    """Return how many processes a launcher or the settings name; 1 for devices=auto, which the
    trainer counts.
    """
    if processes.launcher:
        return processes.count
    if settings.devices == "auto":
        return 1
    return len(settings.devices) if isinstance(settings.devices, list) else settings.devices


def check_launcher(settings: TrainerSettings, processes: Processes) -> None:
    """Raise UserError for numbers of devices and machines that are not those of the launcher."""
    nodes = settings.other("num_nodes", 1)
    if processes.launcher is None:
        if nodes != 1:
            raise UserError(
                f"trainer.num_nodes={shown(nodes)} needs a launcher that starts this command on"
                " every machine; start it with torchrun or srun (docs/machines.md)."
            )
        return
    for key, value, started in (
        ("num_nodes", nodes, (1, processes.num_machines)),
        ("devices", settings.devices, (1, "auto", processes.count_here)),
    ):
        if value not in started:
            raise UserError(
                f"trainer.{key}={shown(value)}, but {processes.launcher} has started"
                f" {processes.count_here} processes on each of {processes.num_machines} machines;"
                " leave it out."
            )
