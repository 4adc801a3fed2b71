"""`specheads distill model=llama2-7b`: train the draft itself to propose what its target would say."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table

from data_gen.settings import Generation
from specheads.commands.command import command, next_command
from specheads.commands.compose import check_every_split, load_configured_pair, model_config, say_needs, settings_of, source_of
from specheads.commands.data import check_data, data_cache
from specheads.commands.loggers import open_loggers
from specheads.pair.pair import Pair
from specheads.processes import is_first_process
from specheads.prompts.encoding import GeneratedData
from specheads.prompts.prompt import SPLITS, unique
from specheads.training.distill.draft_quality import MEANINGS
from specheads.training.distill.settings import Distillation
from specheads.training.settings import check_processes

if TYPE_CHECKING:
    from specheads.training.distill.distillation import DistilledDraft

HELD_OUT = ("dev", "test")  # splits that a draft is measured on


@command("distill", Generation, Distillation, shared=True)
def main(cfg: DictConfig) -> None:
    """Distil the draft, and print the command that comes next."""
    folder = distill_draft(cfg)
    if is_first_process():
        print(f"next: {next_command('train', f'model.draft={folder}')}")


def distill_draft(cfg: DictConfig, pair: Pair | None = None) -> Path:
    """Distil the draft of a composed config's pair, which may be loaded already; return the folder of the new draft."""
    check_data(cfg)
    distilled = distill_configured_draft(cfg, pair)
    if is_first_process():
        print_draft(distilled)
    return distilled.folder


def distill_configured_draft(cfg: DictConfig, pair: Pair | None = None) -> "DistilledDraft":
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
        return distill(pair, partial(responses_of, cfg, pair, settings), settings, run, loggers)


def distillation_of(cfg: DictConfig) -> Distillation:
    """Return the settings of a composed config.

    Raises:
        UserError: a mistake in them, or in the prompts that the draft is to learn from.
    """
    settings = settings_of(Distillation, cfg)
    check_every_split(cfg)
    check_processes(settings.trainer, settings.loader)
    return settings


def responses_of(cfg: DictConfig, pair: Pair, settings: Distillation) -> GeneratedData:
    """Return the data set of a distillation: the target's responses without labels, and the prompts.

    The prompts have the responses of their source if the draft learns from these.
    """
    prompts = unique(source_of(cfg).load(pair.chats, responses="text" in settings.shares))
    splits = SPLITS if "target" in settings.shares else HELD_OUT
    return data_cache(cfg, pair, splits=splits, prompts=prompts, labelled=False)


def print_draft(distilled: "DistilledDraft") -> None:
    """Print the draft's quality before and after the distillation, and its folder."""
    table = Table("on test prompts", box=box.SIMPLE_HEAD)
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for name, after in distilled.after.items():
        before = distilled.before[name]
        table.add_row(name, f"{before:.4f}", f"{after:.4f}", f"{after / before - 1:+.1%}" if before else "-")
    console = Console(highlight=False)
    console.print("", table)
    for name, meaning in MEANINGS.items():
        console.print(f"{name}: {meaning}", soft_wrap=True)
    print(f"draft: {distilled.folder}")
