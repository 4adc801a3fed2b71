"""`specheads train model=...` trains acceptance heads, `specheads distill` the draft itself.

Missing data is made first.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from specheads.commands.command import next_command
from specheads.commands.compose import (
    load_configured_pair,
    model_config,
    open_loggers,
    settings_of,
    source_of,
)
from specheads.commands.data import data_cache
from specheads.pair.pair import Pair
from specheads.processes import is_first_process
from specheads.prompts.prompt import SPLITS, GeneratedData, unique
from specheads.table import Table, print_table
from specheads.training.distill.settings import Distillation
from specheads.training.heads.settings import HeadTraining

if TYPE_CHECKING:
    from specheads.replay.information import Information
    from specheads.training.distill.distillation import DistilledDraft
    from specheads.training.heads.head_training import TrainedHeads

_METRICS = {"auroc": "AUROC", "kl": "KL", "brier": "Brier", "ece": "ECE"}
MOST_SHOWN = 20  # heads; a bank may have thousands


def train_head(cfg: DictConfig, pair: Pair | None = None) -> "TrainedHeads":
    """Train the heads of a config, for `pair` or its own; print how good they are.

    Raises UserError as `train_heads`.
    """
    settings = settings_of(HeadTraining, cfg)
    run = Path(cfg.paths.run)
    with open_loggers(
        cfg, run
    ) as loggers:  # a failed login is reported before the models are loaded
        from specheads.training.heads.head_training import train_heads  # slow: imports lightning

        # Only the first process makes data and calibrates, and needs the target for it.
        pair = pair or load_configured_pair(cfg, only_draft=not is_first_process())
        trained = train_heads(pair, partial(data_cache, cfg, pair), settings, run, loggers)
    if is_first_process():
        _print_heads(trained)
        print("\n".join(_advice(trained)))
    return trained


def distill_draft(cfg: DictConfig, pair: Pair | None = None) -> "DistilledDraft":
    """Distil the draft of a config's pair; print how good it is, and return it.

    Raises UserError as `distill`.
    """
    settings = settings_of(Distillation, cfg)
    run = Path(cfg.paths.run)
    with open_loggers(cfg, run) as loggers:
        from specheads.training.distill.distillation import distill
        from specheads.training.distill.memory import check_config

        if pair is None:
            check_config(model_config(cfg), settings)
            # A draft that lacks some of the target's tokens learns them.
            pair = replace(
                load_configured_pair(cfg, new_draft=settings.initial_draft), known_to_draft=None
            )
        distilled = distill(
            pair, partial(_responses_of, cfg, pair, settings), settings, run, loggers
        )
    if is_first_process():
        rows = []
        for name, after in distilled.after.items():
            rows.append([name, f"{distilled.before[name]:.4f}", f"{after:.4f}"])
        print_table(Table.of_texts(["on test prompts", "before", "after"], rows))
        dev = distilled.dev
        if dev is not None:
            print(
                f"exported: the weights after epoch {dev.epoch + 1}, the best on dev prompts with"
                f" an overlap of {dev.best:.4f} ({dev.before:.4f} before training, {dev.last:.4f}"
                " after the last epoch)"
            )
        print(f"draft: {distilled.folder}")
        if dev is None or dev.best >= dev.before:
            print(f"next: {next_command('train', f'model.draft={distilled.folder}')}")
        else:
            print(
                "WARNING: the draft became worse: on dev prompts its overlap with the target is"
                f" {dev.best:.4f}, and was {dev.before:.4f} before training; keep the old one, and"
                " train with a smaller optimizer.lr="
            )
    return distilled


def _advice(trained: "TrainedHeads") -> Iterator[str]:
    """Yield which heads learned nothing, and the next command unless none learned anything."""
    useless = [name for name, loss in trained.dev.items() if not loss.best < loss.constant]
    if useless:
        yield (
            f"WARNING: {', '.join(useless)} predict dev prompts no better than one number for all"
            " tokens, so nothing was learned; use a smaller optimizer.lr=, more prompts"
            " (data.num_train=) or more epochs (trainer.max_epochs=)"
        )
    if len(useless) < len(trained.names):
        yield f"next: {next_command('evaluate', f'head={trained.folder}')}"


def _responses_of(cfg: DictConfig, pair: Pair, settings: Distillation) -> GeneratedData:
    """Return the data set of a distillation: the target's responses without labels, and the
    prompts, with responses to learn.
    """
    prompts = unique(source_of(cfg).load(pair.chats, responses=settings.samples == "text"))
    # A draft is measured on the last two.
    splits = SPLITS if settings.samples == "target" else ("dev", "test")
    return data_cache(cfg, pair, splits=splits, prompts=prompts, labelled=False)


def _print_heads(trained: "TrainedHeads") -> None:
    """Print how heads compare with rules without one, and their calibration.

    Of many those of the lowest KL.
    """
    names = list(trained.names)
    if len(names) > MOST_SHOWN:
        names = sorted(names, key=lambda name: trained.test[name]["kl"])[:MOST_SHOWN]
        print(
            f"the {MOST_SHOWN} heads of the lowest KL; all are in {trained.folder.parent}/test.json"
        )
    rules = [name for name in trained.test if name not in trained.names]
    rows = []
    for name in (*names, *rules):
        metrics = trained.test[name]
        rows.append([name, *(f"{metrics[key]:.3f}" if key in metrics else "-" for key in _METRICS)])
    print_table(Table.of_texts(["on held-out prompts", *_METRICS.values()], rows))
    for name in names:
        if name in trained.dev and trained.dev[name].best < trained.dev[name].last:
            loss = trained.dev[name]
            print(
                f"{name}: exported after epoch {loss.epoch + 1}, the best on dev prompts with a"
                f" loss of {loss.best:.4f} ({loss.last:.4f} after the last epoch)"
            )
    if trained.calibrated:
        rows = []
        for name in names:
            each = trained.calibrated[name]
            errors = []
            for error in (each.ece, each.log_loss):
                errors += [f"{error['raw']:.4f}", f"{error['cross_fitted']:.4f}"]
            rows.append([name, *errors, each.best if each.used else "none"])
        columns = ["on dev prompts", "ECE", "after", "log loss", "after", "calibration"]
        print_table(Table.of_texts(columns, rows))
        print("after: calibrated on one half of the prompts, measured on the other")
    if trained.information is not None:
        _print_information(trained.information)
    print(f"\n{'head' if len(trained.names) == 1 else 'heads'}: {trained.folder}")


def _print_information(known: "Information") -> None:
    """Print the reducible uncertainty about acceptance on dev prompts, how much of it predictors
    explain, and whether a head is worth it.
    """
    print(
        f"\nacceptance of a drafted token: {known.entropy.value:.3f} nats of uncertainty,"
        f" {known.irreducible.value:.3f} irreducible, {known.reducible.value:.3f} reducible"
    )
    ranked = sorted(known.explained.items(), key=lambda item: -item[1].value)
    for name, share in ranked[:MOST_SHOWN]:
        print(f"  {name} explains {share.value:.1%} [{share.low:.1%}, {share.high:.1%}] of that")
    if known.over_logistic:
        name, more = max(known.over_logistic.items(), key=lambda item: item[1].value)
        how = "better" if more.low > 0 else "not clearly better"
        print(
            f"{name}, the best head, is {how} than the free logistic: {more.value:+.1%}"
            f" [{more.low:+.1%}, {more.high:+.1%}] of that"
        )
        if more.low <= 0:
            print(
                "it needs more prompts (data.num_train=) or epochs (trainer.max_epochs=); head=null"
                " evaluates rules without one"
            )
