"""`specheads train model=llama2-7b`: train an acceptance head; missing data is generated first.

`specheads distill`, which is `specheads train task=distill`, trains the draft itself. `--help` lists every key of the task, and
`-m head.depth=0,1,2,3,4 loss.reject_weight=1,3,6,12` sweeps.
"""

from pathlib import Path

from omegaconf import DictConfig

from data_gen.settings import Generation
from specheads.commands.command import command, next_command
from specheads.commands.data import check_data, data_cache
from specheads.commands.distillation import distill_configured_draft
from specheads.commands.draft_report import print_draft
from specheads.commands.head_report import print_heads
from specheads.commands.head_training import train_configured_heads
from specheads.errors import UserError
from specheads.pair import Pair
from specheads.processes import is_first_process
from specheads.settings import Settings
from specheads.training.distill.settings import Distillation
from specheads.training.heads.settings import HeadTraining


def train_head(cfg: DictConfig, pair: Pair | None = None) -> Path:
    """Train the heads of a composed config for its pair, which may be loaded already; return the folder of the head or heads."""
    check_data(cfg)
    trained = train_configured_heads(cfg, data_cache, pair)
    if is_first_process():
        print_heads(trained)
    return trained.folder


def distill_draft(cfg: DictConfig, pair: Pair | None = None) -> Path:
    """Distil the draft of a composed config's pair, which may be loaded already; return the folder of the new draft."""
    check_data(cfg)
    distilled = distill_configured_draft(cfg, data_cache, pair)
    if is_first_process():
        print_draft(distilled)
    return distilled.folder


def settings_classes(cfg: DictConfig) -> list[type[Settings]]:
    """Return the classes of settings of a composed config; raises UserError for an unknown task."""
    if cfg.task not in TASKS:
        raise UserError(f"task={cfg.task} is not known; use {' or '.join(TASKS)}.")
    return [Generation, CLASSES[cfg.task]]


TASKS = {"head": train_head, "distill": distill_draft}  # each returns a folder
CLASSES: dict[str, type[Settings]] = {"head": HeadTraining, "distill": Distillation}
NEXT = {"head": ("evaluate", "head={folder}"), "distill": ("train", "model.draft={folder}")}


@command("train", settings_classes, shared=True)
def main(cfg: DictConfig) -> None:
    """Do the task, and print the command that comes next."""
    folder = TASKS[cfg.task](cfg)
    if is_first_process():
        verb, override = NEXT[cfg.task]
        print(f"next: {next_command(verb, override.format(folder=folder))}")
