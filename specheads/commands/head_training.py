"""Head training from a composed config: settings are checked, the pair is loaded, and data is generated."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from specheads.commands.compose import check_every_split, load_configured_pair, settings_of
from specheads.commands.loggers import open_loggers
from specheads.pair import Pair
from specheads.processes import is_first_process
from specheads.prompts.encoding import GeneratedData
from specheads.training.heads.settings import HeadTraining
from specheads.training.settings import check_processes

if TYPE_CHECKING:
    from specheads.training.heads.head_training import TrainedHeads


def train_configured_heads(
    cfg: DictConfig, make_data: Callable[[DictConfig, Pair], GeneratedData], pair: Pair | None = None
) -> "TrainedHeads":
    """Train the heads of a composed config for its pair, which may be loaded already, and return them.

    Raises:
        UserError: see head_training_of; a model that cannot be loaded; see train_heads.
    """
    settings, run = head_training_of(cfg), Path(cfg.paths.run)
    with open_loggers(cfg, run) as loggers:  # a failed login is reported before the models are loaded
        from specheads.training.heads.head_training import train_heads  # slow: imports lightning

        # The first process makes data and calibrates; others need the target where heads read its states.
        only_draft = not is_first_process() and not settings.reads_target
        pair = pair or load_configured_pair(cfg, only_draft)
        return train_heads(pair, partial(make_data, cfg, pair), settings, run, loggers)


def head_training_of(cfg: DictConfig) -> HeadTraining:
    """Return the settings of a composed config.

    Raises:
        UserError: a mistake in them, or in the prompts and the data that heads are to learn from.
    """
    settings = settings_of(HeadTraining, cfg)
    check_every_split(cfg)
    check_processes(settings.trainer, settings.loader)
    return settings
