"""`specheads learning_curve model=nano`: compare heads of growing shares of the train prompts.

All heads learn from one data cache and one store of features, for the same number of steps, and are compared by replay with
thresholds that are chosen on dev prompts. Each has its folder in that of the run, like the jobs of a sweep, and a rerun resumes
the unfinished one. `specheads learning_curve --help` lists every key.
"""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from data_gen.settings import Generation
from specheads.commands.command import command, next_command
from specheads.commands.compose import load_configured_pair
from specheads.commands.data import data_cache
from specheads.commands.evaluation import config_text, prompt_data, replay_settings
from specheads.commands.head_training import head_training_of, train_configured_heads
from specheads.errors import UserError
from specheads.evaluation.candidates import candidates
from specheads.evaluation.head_folders import LocatedHead
from specheads.evaluation.intervals import auroc_samples, interval, mean_samples
from specheads.evaluation.learning_curve_files import write_curves
from specheads.evaluation.learning_curve_report import Curve, Point, print_curve
from specheads.evaluation.recordings import record
from specheads.evaluation.replayed_rows import data_set
from specheads.evaluation.replayed_sets import choose, replay_all
from specheads.evaluation.report import Winner
from specheads.evaluation.rule_costs import Tuning
from specheads.evaluation.settings import LearningCurve
from specheads.evaluation.setup import Setup, versions
from specheads.forecast import Forecast
from specheads.heads.checkpoint import load_head
from specheads.pair import Pair
from specheads.replay.recording import Recording
from specheads.replay.replay import RecordedHead, head_logits, predicted_nodes, recorded_head
from specheads.settings import Settings
from specheads.storage import runs
from specheads.storage.data_set import load_split
from specheads.training.heads.mixed_responses import first_rows
from specheads.training.heads.settings import HeadTraining

logger = logging.getLogger(__name__)

# Keys that are set for each head, or that would make heads incomparable; a missing key has the value that fits.
FIXED_KEYS = {
    "train_share": (1, "shares= says what heads learn from"),
    "trainer.max_steps": (-1, "steps are those of trainer.max_epochs passes over all train prompts"),
    "trainer.check_val_every_n_epoch": (1, "all heads are validated as often"),
    "trainer.devices": (1, "heads of a learning curve are trained one after another, on one device"),
}


@dataclass(frozen=True)
class Plan:
    """How the head of one share is trained, and in which folder."""

    share: float
    num_prompts: int
    num_responses: int
    num_epochs: int
    num_steps: int
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name


def learning_curve(cfg: DictConfig) -> list[Curve]:
    """Train the head of every share, compare them, print and write the curves; return one for each set of test prompts.

    Raises:
        UserError: settings that do not fit.
    """
    settings = checked(cfg)
    pair, run = load_configured_pair(cfg), Path(cfg.paths.run)
    if len(specs := head_training_of(cfg).specs()) > 1:
        raise UserError(
            f"a learning curve is of one head, but {len(specs)} are asked for; give each key of head and loss one value."
        )
    prompt_ids = load_split(data_cache(cfg, pair).folder, "train")["prompt_id"][:]
    shares = plans(cfg, settings.shares, prompt_ids)
    folders = train_heads(cfg, pair, shares)
    located = {name: LocatedHead(load_head(folder), str(folder)) for name, folder in folders.items()}
    curves = compare_heads(Setup(pair, located, settings, prompt_data(cfg), Path(cfg.paths.data), run), shares)
    for curve in curves:
        print_curve(curve)
    context = {"model": pair.name, "versions": versions(), "config": config_text(cfg)}
    for path in write_curves(curves, context, run):
        print(path)
    print(f"next: {next_command('evaluate', f'head={folders[shares[-1].name]}')}")
    return curves


def checked(cfg: DictConfig) -> LearningCurve:
    """Return the settings; raises UserError for mistakes that can be known before models are loaded and data is made."""
    settings = replay_settings(LearningCurve, cfg)
    for key, (value, reason) in FIXED_KEYS.items():
        if (given := OmegaConf.select(cfg, key, default=value)) != value:
            raise UserError(f"{key}={given} does not fit a learning curve: {reason}; leave it out.")
    if not isinstance(cfg.resume, bool):
        raise UserError(f"resume={cfg.resume} must be true or false; each head of a learning curve has checkpoints of its own.")
    head_training_of(cfg)
    prompt_data(cfg).check(settings.split)
    return settings


def plans(cfg: DictConfig, shares: Sequence[float], prompt_ids: Sequence[str]) -> list[Plan]:
    """Return the plan of every share, the smallest first, for a cache of train rows with `prompt_ids`."""

    def steps_per_epoch(num_rows: int) -> int:
        return math.ceil(math.ceil(num_rows / cfg.loader.batch_size) / cfg.trainer.get("accumulate_grad_batches", 1))

    # With equal epochs a head of fewer prompts would also be trained for fewer steps: its curve would be one of training time.
    num_steps, planned = cfg.trainer.max_epochs * steps_per_epoch(len(prompt_ids)), []
    for share in sorted(set(shares)):
        rows = first_rows(prompt_ids, share)
        num_prompts, num_epochs = len({prompt_ids[row] for row in rows}), math.ceil(num_steps / steps_per_epoch(len(rows)))
        planned.append(Plan(share, num_prompts, len(rows), num_epochs, num_steps, Path(cfg.paths.run) / f"share-{share:g}"))
    return planned


def train_heads(cfg: DictConfig, pair: Pair, planned: Sequence[Plan]) -> dict[str, Path]:
    """Train the heads that are not done; return every head's folder by its plan's name."""
    logger.info(
        "learning curve: %d heads of %d steps each, from %s train prompts, into %s",
        len(planned),
        planned[0].num_steps,
        ", ".join(f"{plan.num_prompts:,}" for plan in planned),
        cfg.paths.run,
    )
    heads, forecast = {}, Forecast("all heads")
    for number, plan in enumerate(planned):
        plan.folder.mkdir(parents=True, exist_ok=True)
        if runs.begin_job(Path(cfg.paths.run), plan.folder):
            forecast.update(number, len(planned))
            logger.info("head %d of %d: %s of the train prompts", number + 1, len(planned), f"{plan.share:.4g}")
            train_configured_heads(settings_of(cfg, plan), data_cache, pair)
            runs.finish(plan.folder)
            forecast.update(number + 1, len(planned))
        (heads[plan.name],) = (config.parent for config in plan.folder.glob("heads/*/config.json"))
    return heads


def settings_of(cfg: DictConfig, plan: Plan) -> DictConfig:
    """Return the config that specheads train would be given for one share."""
    changed = copy.deepcopy(cfg)
    changed.paths.run, changed.train_share = str(plan.folder), plan.share
    with open_dict(changed.trainer):
        changed.trainer.max_epochs, changed.trainer.max_steps = plan.num_epochs, plan.num_steps
        changed.trainer.check_val_every_n_epoch = max(1, plan.num_epochs // cfg.trainer.max_epochs)
    return changed


def compare_heads(setup: Setup, planned: Sequence[Plan]) -> list[Curve]:
    """Replay the rules of all heads on the same recordings; return a curve for each set of test prompts."""
    recorded, cost_table = record(setup), setup.counted_costs()
    rules = candidates(setup.rules, setup.heads, Tuning(recorded[0].recording, cost_table))
    dev, *tests = replay_all(recorded, rules)
    choices = choose(dev, rules, cost_table)
    head_of = {rule.family: rule.head for rule in rules}
    curves = []
    for replayed in tests:
        data, points, aurocs = data_set(replayed, choices), [], []
        for plan in planned:
            winners = [row for row in data.winners if head_of.get(row.family) == plan.name]
            head, where = recorded_head(setup.heads[plan.name]), setup.located_heads[plan.name].where
            auroc, kl = prediction_samples(replayed.recording, head, replayed.resamples)
            sizes = plan.share, plan.num_prompts, plan.num_responses, plan.num_epochs, plan.num_steps
            points.append(Point(*sizes, where, interval(auroc), interval(kl), best_by_ratio(winners)))
            aurocs.append(auroc)
        last_step = interval(aurocs[-1] - aurocs[-2]) if len(aurocs) > 1 else None
        curves.append(Curve(data.name, data.num_prompts, points, last_step))
    return curves


def prediction_samples(recording: Recording, head: RecordedHead, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return AUROC and binary KL (nats) of a head's predictions for drafted tokens, (1 + R,) each, under the rows of `counts`."""
    node = predicted_nodes(recording, head)[0]
    logits, accepted, _ = head_logits(recording, head)
    logits = logits[:, 0]  # each token once, as the first of a round
    # Against the outcome of a token, which has no entropy, the divergence is the cross-entropy.
    kl = torch.nn.functional.binary_cross_entropy_with_logits(logits, accepted.double(), reduction="none")
    prompt = recording.prompt_of(node).numpy()
    return auroc_samples(logits.numpy(), accepted.numpy(), prompt, counts), mean_samples(kl.numpy(), prompt, counts)


def best_by_ratio(winners: Sequence[Winner]) -> dict[str, Winner]:
    """Return at each ratio the winner that was fastest on dev prompts."""
    ratios = dict.fromkeys(row.ratio for row in winners)
    return {ratio: max((row for row in winners if row.ratio == ratio), key=lambda row: row.dev_speedup) for ratio in ratios}


def settings_classes(cfg: DictConfig) -> list[type[Settings]]:
    """Return the classes of settings of a composed config; raises UserError for another task than the training of heads."""
    if cfg.task != "head":
        raise UserError(f"task={cfg.task} does not fit a learning curve, which is one of heads; leave it out.")
    return [Generation, HeadTraining, LearningCurve]


@command("learning_curve", settings_classes)
def main(cfg: DictConfig) -> None:
    """Train, compare and report the heads of all shares."""
    learning_curve(cfg)


if __name__ == "__main__":
    main()
