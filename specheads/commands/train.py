"""`specheads train model=...` trains acceptance heads, `specheads distill` the draft itself.

Missing data is made first.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from specheads.commands.command import next_command, print_log
from specheads.commands.compose import (
    load_configured_pair,
    model_config,
    open_loggers,
    settings_of,
    source_of,
)
from specheads.commands.data import data_cache
from specheads.pair.eagle_formats import is_feature_draft
from specheads.pair.pair import Pair
from specheads.processes import is_first_process
from specheads.prompts.prompt import SPLITS, GeneratedData, unique
from specheads.table import Table, print_table
from specheads.training.distill.settings import Distillation
from specheads.training.heads.settings import HeadTraining, title_of

if TYPE_CHECKING:
    from specheads.replay.information import Information
    from specheads.replay.intervals import Interval
    from specheads.training.distill.distillation import DistilledDraft
    from specheads.training.heads.head_training import TrainedHeads

_METRICS = {"auroc": "AUROC", "ece": "ECE"}  # on test prompts; test.json has more
LOGISTIC_TITLE = "logistic regression"  # of the draft's confidence, without a head
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

        # The first process makes data and calibrates, and needs the target for it; others need it
        # where their draft reads it.
        if pair is None:
            config = model_config(cfg)
            draft = config.draft or ""
            needs_target = is_first_process() or is_feature_draft(draft, config.draft_revision)
            pair = load_configured_pair(cfg, only_draft=not needs_target)
        trained = train_heads(pair, partial(data_cache, cfg, pair), settings, run, loggers)
    if is_first_process():
        _print_heads(trained)
        print_log()
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
        print_log()
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
    """Print how well heads predict acceptance, next to a logistic regression without one.

    Of many those of the lowest KL.
    """
    names = list(trained.names)
    if len(names) > MOST_SHOWN:
        names = sorted(names, key=lambda name: trained.test[name]["kl"])[:MOST_SHOWN]
        print(
            f"the {MOST_SHOWN} heads of the lowest KL; all are in {trained.folder.parent}/test.json"
        )
    from specheads.replay.information import LOGISTIC  # slow: imports torch

    known = trained.information
    explained = {} if known is None else known.explained
    rows = []
    for name in names:
        metrics = trained.test[name]
        numbers = [f"{metrics[key]:.3f}" for key in _METRICS]
        rows.append([title_of(name), _share(explained.get(name)), *numbers, name])
    if LOGISTIC in explained:
        missing = ["-"] * len(_METRICS)
        rows.append([LOGISTIC_TITLE, _share(explained[LOGISTIC]), *missing, "-"])
    print_table(Table.of_texts(["", "explains", *_METRICS.values(), "folder"], rows))
    if known is not None:
        _print_information(known)
    print(f"{'head' if len(trained.names) == 1 else 'heads'}: {trained.folder}")


def _share(share: "Interval | None") -> str:
    """Return a share with its interval, in percent."""
    if share is None:
        return "-"
    return f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"


def _print_information(known: "Information") -> None:
    """Print what the shares are of, and whether the best head explains more than a logistic
    regression without a head.
    """
    print(
        f"explains: of {known.reducible.value:.3f} nats of reducible uncertainty about acceptance,"
        f" on dev prompts ({known.irreducible.value:.3f} nats are irreducible)"
    )
    if not known.over_logistic:
        return
    name, more = max(known.over_logistic.items(), key=lambda item: item[1].value)
    how = "better" if more.low > 0 else "not clearly better"
    print(
        f"The {title_of(name)} is {how} than the logistic regression:"
        f" {100 * more.value:+.1f} points [{100 * more.low:+.1f}, {100 * more.high:+.1f}]."
    )
    if more.low <= 0:
        print(
            "It needs more prompts (data.num_train=) or epochs (trainer.max_epochs=); head=null"
            " evaluates rules without one."
        )
