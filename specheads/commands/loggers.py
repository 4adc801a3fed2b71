"""Where metrics and tables go besides this run's files."""

import hashlib
from pathlib import Path

import wandb
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig

from specheads.errors import UserError


def new_logger(cfg: DictConfig, run: Path) -> Logger:
    """Return a logger; a W&B run without an id gets one from its folder, so that it goes on after an interruption.

    Raises:
        UserError: W&B cannot be reached or does not know the user.
    """
    if not cfg._target_.endswith("WandbLogger"):
        return instantiate(cfg)
    name = f"{run.parent.name}-{run.name}" if run.name.isdigit() else run.name  # a job of a sweep has a number
    number = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:6]
    logger = instantiate(cfg, id=cfg.get("id") or f"{name}-{number}")
    try:
        _ = logger.experiment  # starts the run now, before an hour of generating data
    except wandb.errors.Error as error:
        raise UserError(
            f"logger.wandb.offline={cfg.get('offline')}: {error} Log in with `wandb login`, or keep the logs here with "
            "logger.wandb.offline=true."
        ) from error
    return logger
