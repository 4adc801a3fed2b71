"""Distillation from a composed config: settings are checked, the pair is loaded, and responses are generated."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from specheads.commands.compose import check_every_split, load_configured_pair, model_config, say_needs, settings_of, source_of
from specheads.commands.loggers import open_loggers
from specheads.pair import Pair
from specheads.prompts.encoding import GeneratedData
from specheads.prompts.prompt import SPLITS, unique
from specheads.training.distill.settings import Distillation
from specheads.training.settings import check_processes

if TYPE_CHECKING:
    from specheads.training.distill.distillation import DistilledDraft

HELD_OUT = ("dev", "test")  # splits that a draft is measured on
MakeData = Callable[..., GeneratedData]  # takes a config, a pair, and `splits`, `prompts` and `labelled` by name


def distill_configured_draft(cfg: DictConfig, make_data: MakeData, pair: Pair | None = None) -> "DistilledDraft":
    """Distil the draft of a composed config's pair, which may be loaded already.

    Raises:
        UserError: see distillation_of; a draft whose training does not fit the GPU; a model that cannot be loaded; see
            distill.
    """
    settings, run = distillation_of(cfg), Path(cfg.paths.run)
    with open_loggers(cfg, run) as loggers:  # a failed login is reported before the models are loaded
        from specheads.training.distill.distillation import distill  # slow: imports lightning
        from specheads.training.distill.memory import check_config

        if pair is None:
            say_needs(cfg)
            check_config(model_config(cfg), settings, cfg.data.max_prompt_tokens + cfg.data.max_new_tokens)
            # A draft that lacks some of the target's tokens learns them.
            pair = replace(load_configured_pair(cfg, new_draft=settings.initial_draft), known_to_draft=None)
        return distill(pair, partial(responses_of, cfg, pair, settings, make_data), settings, run, loggers)


def distillation_of(cfg: DictConfig) -> Distillation:
    """Return the settings of a composed config.

    Raises:
        UserError: a mistake in them, or in the prompts that the draft is to learn from.
    """
    settings = settings_of(Distillation, cfg)
    check_every_split(cfg)
    check_processes(settings.trainer, settings.loader)
    return settings


def responses_of(cfg: DictConfig, pair: Pair, settings: Distillation, make_data: MakeData) -> GeneratedData:
    """Return the data set of a distillation: the target's responses without labels, and the prompts.

    The prompts have the responses of their source if the draft learns from these.
    """
    prompts = unique(source_of(cfg).load(pair.chats, responses="text" in settings.shares))
    splits = SPLITS if "target" in settings.shares else HELD_OUT
    return make_data(cfg, pair, splits=splits, prompts=prompts, labelled=False)
