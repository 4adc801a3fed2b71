"""The loggers of a run: where metrics and tables go, in addition to its files."""

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.utils import instantiate
from omegaconf import DictConfig

from specheads.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


@contextlib.contextmanager
def open_loggers(cfg: DictConfig, run: Path) -> Iterator[list["Logger"]]:
    """Yield the loggers of `cfg.logger` for the run in a folder; end the W&B run, so that this process may begin another.

    Raises:
        UserError: W&B cannot be reached or does not know the user.
    """
    try:
        yield [new_logger(logger, run) for logger in (cfg.get("logger") or {}).values()]
    finally:
        if "wandb" in sys.modules:
            sys.modules["wandb"].finish()


def new_logger(cfg: DictConfig, run: Path) -> "Logger":
    """Return a logger; a W&B run without an id gets the id of its folder, so that an interrupted run is resumed.

    Raises:
        UserError: TensorBoard is not installed; W&B cannot be reached or does not know the user.
    """
    if cfg._target_.endswith("TensorBoardLogger") and not (find_spec("tensorboard") or find_spec("tensorboardX")):
        raise UserError("logger=tensorboard needs its package: pip install tensorboard; or use logger=csv.")
    if not cfg._target_.endswith("WandbLogger"):
        return instantiate(cfg)
    import wandb  # slow to import, and often not used

    name = f"{run.parent.name}-{run.name}" if run.name.isdigit() else run.name  # a job of a sweep has a number
    number = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:6]
    logger = instantiate(cfg, id=cfg.get("id") or f"{name}-{number}")
    try:
        _ = logger.experiment  # starts the run now, before an hour of generating data
    except wandb.errors.Error as error:
        raise UserError(
            f"logger.wandb.offline={str(cfg.get('offline')).lower()}: {error} Log in with `wandb login`, or keep the logs on "
            "this machine with logger.wandb.offline=true."
        ) from error
    return logger
