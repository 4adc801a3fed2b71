"""`python train.py model=llama2-7b`: train an acceptance head, making the data first where it is missing.

`python train.py task=distill` trains the draft itself. `python train.py --help` lists every key, with `task=distill` that task's;
`-m head.depth=0,1,2,3,4 loss.reject_weight=1,3,6,12` sweeps.
"""

from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from data_gen.__main__ import check_data, data_cache
from specheads.commands.command import command, is_first_process, next_command
from specheads.commands.compose import load_configured_pair, settings_of, source_of
from specheads.commands.head_report import print_heads
from specheads.commands.loggers import open_loggers
from specheads.errors import UserError
from specheads.pair import Pair
from specheads.prompts.generated_data import GeneratedData
from specheads.prompts.prompt import SPLITS, unique
from specheads.training.distill.settings import Distillation
from specheads.training.heads.settings import HeadTraining

HELD_OUT = ("dev", "test")  # splits that a draft is measured on


def train_head(cfg: DictConfig) -> Path:
    """Train the heads of a composed config; return the folder of the head, or of all heads."""
    settings, run = settings_of(HeadTraining, cfg), Path(cfg.paths.run)
    check_data(cfg)
    check_splits(cfg)
    if "rollout" in settings.labels and not cfg.generation.rollouts_per_response:
        raise UserError(
            "head.label=rollout needs rollouts, but generation.rollouts_per_response=0; ask for some, for example "
            "generation.rollouts_per_response=4, in data_gen and in train.py."
        )
    with open_loggers(cfg, run) as loggers:
        from specheads.training.heads.head_training import train_heads  # imports lightning, for which mistakes need not wait

        # The first process makes the data and calibrates; others need the target where heads read its states.
        only_draft = not is_first_process() and not settings.reads_target
        pair = load_configured_pair(cfg, only_draft)
        trained = train_heads(pair, partial(data_cache, cfg, pair), settings, run, loggers)
    if is_first_process():
        print_heads(trained)
    return trained.folder


def distill_draft(cfg: DictConfig) -> Path:
    """Distil the draft of a composed config; return the folder of the new draft."""
    settings, run = settings_of(Distillation, cfg), Path(cfg.paths.run)
    check_data(cfg)
    check_splits(cfg)
    with open_loggers(cfg, run) as loggers:
        from specheads.commands.draft_report import print_draft  # import lightning, for which mistakes need not wait
        from specheads.training.distill.distillation import distill

        pair = load_configured_pair(cfg, new_draft=settings.initial_draft)
        distilled = distill(pair, partial(target_responses, cfg, pair, settings), settings, run, loggers)
    if is_first_process():
        print_draft(distilled)
    return distilled.folder


def target_responses(cfg: DictConfig, pair: Pair, settings: Distillation) -> GeneratedData:
    """Return the data set that a distillation reads: the target's responses, without labels, and responses of the prompts' data set."""
    prompts = unique(source_of(cfg).load(pair.chats, responses="text" in settings.shares))
    splits = SPLITS if "target" in settings.shares else HELD_OUT
    return data_cache(cfg, pair, splits, prompts, labelled=False)


def check_splits(cfg: DictConfig) -> None:
    """Raise UserError unless there are prompts to train on, to choose by and to report on."""
    for key in ("num_train", "num_dev", "num_test"):
        if not cfg.data[key]:
            raise UserError(f"data.{key}={cfg.data[key]} must be a positive integer; training needs prompts of every split.")


TASKS = {"head": train_head, "distill": distill_draft}  # each returns a folder
NEXT = {"head": ("evaluate.py", "head={folder}"), "distill": ("train.py", "model.draft={folder}")}


@command("train")
def main(cfg: DictConfig) -> None:
    """Train what `task` names, and say what comes next."""
    if cfg.task not in TASKS:
        raise UserError(f"task={cfg.task} is not known; use {' or '.join(TASKS)}.")
    folder = TASKS[cfg.task](cfg)
    if is_first_process():
        script, override = NEXT[cfg.task]
        print(f"next: {next_command(script, override.format(folder=folder))}")


if __name__ == "__main__":
    main()
