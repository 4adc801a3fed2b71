"""`specheads train model=llama2-7b`: train acceptance heads; missing data is generated first.

`--help` lists every key, and `-m head.depth=0,1,2,3,4 loss.reject_weight=1,3,6,12` sweeps.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table

from data_gen.settings import Generation
from specheads.commands.command import command, next_command
from specheads.commands.compose import check_every_split, load_configured_pair, settings_of
from specheads.commands.data import check_data, data_cache
from specheads.commands.loggers import open_loggers
from specheads.pair.pair import Pair
from specheads.processes import is_first_process
from specheads.training.heads.settings import HeadTraining
from specheads.training.settings import check_processes

if TYPE_CHECKING:
    from specheads.training.heads.head_training import TrainedHeads

METRICS = {"auroc": "AUROC", "kl": "KL", "brier": "Brier", "ece": "ECE"}
MOST_SHOWN = 20  # heads; a bank may have thousands


@command("train", Generation, HeadTraining, folder="head", shared=True)
def main(cfg: DictConfig) -> None:
    """Train heads, and print the command that comes next."""
    folder = train_head(cfg)
    if is_first_process():
        print(f"next: {next_command('evaluate', f'head={folder}')}")


def train_head(cfg: DictConfig, pair: Pair | None = None) -> Path:
    """Train the heads of a composed config for its pair, which may be loaded already; return the folder of the head or heads."""
    check_data(cfg)
    trained = train_configured_heads(cfg, pair)
    if is_first_process():
        print_heads(trained)
    return trained.folder


def train_configured_heads(cfg: DictConfig, pair: Pair | None = None) -> "TrainedHeads":
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
        return train_heads(pair, partial(data_cache, cfg, pair), settings, run, loggers)


def head_training_of(cfg: DictConfig) -> HeadTraining:
    """Return the settings of a composed config.

    Raises:
        UserError: a mistake in them, or in the prompts and the data that heads are to learn from.
    """
    settings = settings_of(HeadTraining, cfg)
    check_every_split(cfg)
    check_processes(settings.trainer, settings.loader)
    return settings


def print_heads(trained: "TrainedHeads") -> None:
    """Print how the heads compare with rules without a head, how well they are calibrated in rounds, and their folder.

    Of very many heads, those of the lowest KL are shown.
    """
    console = Console(highlight=False)
    shown, others = best_heads(trained), [name for name in trained.test if name not in trained.names]
    table = _table("on held-out prompts", *METRICS.values())
    for name in [*shown, *others]:
        metrics = trained.test[name]
        table.add_row(name, *(f"{metrics[key]:.3f}" if key in metrics else "-" for key in METRICS))
    console.print("", table)
    if left_out := trained.num_heads - len(shown):
        console.print(f"the {len(shown)} heads of the lowest KL; {left_out:,} more are in {trained.folder.parent}/test.json")
    if trained.calibration_errors:
        table = _table("in rounds on dev prompts", "ECE", "calibrated")
        for name in shown:
            errors = trained.calibration_errors[name]
            table.add_row(name, f"{errors['raw']:.3f}", f"{errors['cross_fitted']:.3f}")
            if "overlap_raw" in errors:
                values = (f"{errors[f'overlap_{key}']:.3f}" for key in ("raw", "cross_fitted"))
                table.add_row(f"{name}, before a token is sampled", *values)
        console.print("", table, "calibrated: fitted on one half of the prompts, measured on the other")
    print(f"\n{'head' if trained.num_heads == 1 else 'heads'}: {trained.folder}")


def best_heads(trained: "TrainedHeads") -> list[str]:
    """Return the names of the heads in their order; of more than MOST_SHOWN, those of the lowest KL, the lowest first."""
    if trained.num_heads <= MOST_SHOWN:
        return list(trained.names)
    return sorted(trained.names, key=lambda name: trained.test[name]["kl"])[:MOST_SHOWN]


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(title)
    for column in columns:
        table.add_column(column, justify="right")
    return table
