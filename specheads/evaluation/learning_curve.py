"""`python -m specheads.evaluation.learning_curve model=nano`: heads from growing shares of the train prompts, judged side by side.

All of them learn from one data cache and one store of features, for as many steps, and are judged by replay: thresholds are chosen on
dev prompts. Each has a folder of its own in the run's, as the jobs of a sweep have, and a rerun goes on with the one that is not done.
`python -m specheads.evaluation.learning_curve --help` lists every key.
"""

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from data_gen.__main__ import data_cache
from specheads.commands.command import command, load_configured_pair, next_command
from specheads.decoding.drafting import Autoregressive
from specheads.decoding.verification import TokenVerification
from specheads.errors import UserError
from specheads.evaluation import offline
from specheads.evaluation.candidates import candidates, takes_head
from specheads.evaluation.checks import check_lists, check_replay, rule_choices
from specheads.evaluation.curve import Curve, Point, print_curve, write_curves
from specheads.evaluation.find import LocatedHead
from specheads.evaluation.intervals import auroc_samples, interval, mean_samples
from specheads.evaluation.machine import versions
from specheads.evaluation.results import Winner
from specheads.evaluation.run import Evaluation
from specheads.evaluation.tuning import Tuning
from specheads.forecast import Forecast
from specheads.heads.checkpoint import load_head
from specheads.pair import Pair
from specheads.replay.recording import Recording
from specheads.replay.replay import RecordedHead, head_logits, judged_nodes, recorded_head
from specheads.storage import runs
from specheads.storage.data_set import load_split
from specheads.training.heads import head_training as training
from specheads.training.heads.train_share import check_train_share, first_rows

logger = logging.getLogger(__name__)

# What is set for each head, or would make heads unlike each other; a missing key has the value that fits.
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
    """Train the head of every share, judge them, print and write the curves; return one for each set of test prompts.

    Raises:
        UserError: settings that cannot be.
    """
    check(cfg)
    pair, run = load_configured_pair(cfg), Path(cfg.paths.run)
    if len(specs := training.head_specs(cfg, pair)) > 1:
        raise UserError(
            f"a learning curve is of one head, but {len(specs)} are asked for; give each key of head and loss one value."
        )
    prompt_ids = load_split(data_cache(cfg, pair), "train")["prompt_id"][:]
    found = plans(cfg, prompt_ids)
    heads = train_heads(cfg, pair, found)
    curves = judge_heads(cfg, pair, found, heads)
    for curve in curves:
        print_curve(curve)
    context = {"model": pair.name, "versions": versions(), "config": OmegaConf.to_yaml(cfg, resolve=True)}
    for path in write_curves(curves, context, run):
        print(path)
    print(f"next: {next_command('evaluate.py', f'head={heads[found[-1].name]}')}")
    return curves


def check(cfg: DictConfig) -> None:
    """Raise UserError for what can be known to be wrong before models are loaded and data is made."""
    check_lists(cfg, "shares", "ratios")
    for share in cfg.shares:
        check_train_share(share, "share")
    for key in ("shares", "ratios"):
        if not len(cfg[key]):
            raise UserError(f"{key}=[] leaves nothing to judge; leave it out for the usual ones.")
    for key, (value, reason) in FIXED_KEYS.items():
        if (given := OmegaConf.select(cfg, key, default=value)) != value:
            raise UserError(f"{key}={given} does not fit a learning curve: {reason}; leave it out.")
    if not isinstance(cfg.resume, bool):
        raise UserError(f"resume={cfg.resume}: expected true or false; each head of a learning curve has checkpoints of its own.")
    training.check(cfg)
    check_replay(cfg)
    if not any(takes_head(choice) for choice in rule_choices(cfg.stopping).values()):
        raise UserError("stopping has no rule that takes a head; use for example 'stopping=[fixed_length,head_threshold]'.")


def plans(cfg: DictConfig, prompt_ids: Sequence[str]) -> list[Plan]:
    """Return how the head of every share is trained, the smallest first, for a cache whose train rows are of `prompt_ids`."""

    def steps_per_epoch(num_rows: int) -> int:
        return math.ceil(math.ceil(num_rows / cfg.loader.batch_size) / cfg.trainer.get("accumulate_grad_batches", 1))

    # With equal epochs a head of fewer prompts would also be trained for fewer steps: its curve would be one of training time.
    num_steps, found = cfg.trainer.max_epochs * steps_per_epoch(len(prompt_ids)), []
    for share in sorted(set(cfg.shares)):
        rows = first_rows(prompt_ids, share)
        num_prompts, num_epochs = len({prompt_ids[row] for row in rows}), math.ceil(num_steps / steps_per_epoch(len(rows)))
        found.append(Plan(share, num_prompts, len(rows), num_epochs, num_steps, Path(cfg.paths.run) / f"share-{share:g}"))
    return found


def train_heads(cfg: DictConfig, pair: Pair, found: Sequence[Plan]) -> dict[str, Path]:
    """Train what is not done; return every head's folder by its plan's name."""
    logger.info(
        "learning curve: %d heads of %d steps each, from %s train prompts, into %s",
        len(found),
        found[0].num_steps,
        ", ".join(f"{plan.num_prompts:,}" for plan in found),
        cfg.paths.run,
    )
    heads, forecast = {}, Forecast("all heads")
    for number, plan in enumerate(found):
        plan.folder.mkdir(parents=True, exist_ok=True)
        if runs.begin_job(Path(cfg.paths.run), plan.folder):
            forecast.update(number, len(found))
            logger.info("head %d of %d: %s of the train prompts", number + 1, len(found), f"{plan.share:.4g}")
            training.train(settings_of(cfg, plan), pair)
            runs.finish(plan.folder)
            forecast.update(number + 1, len(found))
        (heads[plan.name],) = (config.parent for config in plan.folder.glob("heads/*/config.json"))
    return heads


def settings_of(cfg: DictConfig, plan: Plan) -> DictConfig:
    """Return the config that train.py would be given for one share."""
    own = copy.deepcopy(cfg)
    own.paths.run, own.train_share = str(plan.folder), plan.share
    with open_dict(own.trainer):
        own.trainer.max_epochs, own.trainer.max_steps = plan.num_epochs, plan.num_steps
        own.trainer.check_val_every_n_epoch = max(1, plan.num_epochs // cfg.trainer.max_epochs)
    return own


def judge_heads(cfg: DictConfig, pair: Pair, found: Sequence[Plan], folders: Mapping[str, Path]) -> list[Curve]:
    """Replay the rules of all heads on the same recordings; return a curve for each set of test prompts."""
    heads = {name: LocatedHead(load_head(folder), str(folder)) for name, folder in folders.items()}
    evaluation = Evaluation(cfg, pair, heads, Autoregressive(), TokenVerification(), {})
    recordings, cost_table = evaluation.record(), evaluation.counted_costs()
    (_, dev), *_ = recordings.values()
    rules = candidates(evaluation.stopping, evaluation.heads, Tuning(dev, cost_table))
    dev_table, *tables = evaluation.replay(recordings, rules)
    choices = offline.choose(dev_table, rules, cost_table)
    head_of = {one.family: one.head for one in rules}
    curves = []
    for table in tables:
        data, points, aurocs = offline.data_set(table, rules, choices, cost_table), [], []
        counts = table.resamples
        for plan in found:
            own = [row for row in data.winners if head_of.get(row.family) == plan.name]
            auroc, kl = prediction_samples(table.recording, recorded_head(evaluation.heads[plan.name]), counts)
            sizes = plan.share, plan.num_prompts, plan.num_responses, plan.num_epochs, plan.num_steps, str(folders[plan.name])
            points.append(Point(*sizes, interval(auroc), interval(kl), best_by_ratio(own)))
            aurocs.append(auroc)
        last_step = interval(aurocs[-1] - aurocs[-2]) if len(aurocs) > 1 else None
        curves.append(Curve(data.name, data.num_prompts, points, last_step))
    return curves


def prediction_samples(recording: Recording, head: RecordedHead, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return AUROC and binary KL in nats of what a head says of proposed tokens, (1 + R,) both, under each row of `counts`."""
    node = judged_nodes(recording, head)[0]
    logits, accepted, _ = head_logits(recording, head)
    logits = logits[:, 0]  # each token once, as the first of a round
    # Against what became of a token, which has no entropy, the divergence is the cross-entropy.
    kl = torch.nn.functional.binary_cross_entropy_with_logits(logits, accepted.double(), reduction="none")
    prompt = recording.prompt_of(node).numpy()
    return auroc_samples(logits.numpy(), accepted.numpy(), prompt, counts), mean_samples(kl.numpy(), prompt, counts)


def best_by_ratio(winners: Sequence[Winner]) -> dict[str, Winner]:
    """Return at each ratio the winner that was fastest on dev prompts."""
    ratios = dict.fromkeys(row.ratio for row in winners)
    return {ratio: max((row for row in winners if row.ratio == ratio), key=lambda row: row.dev_speedup) for ratio in ratios}


@command("learning_curve")
def main(cfg: DictConfig) -> None:
    learning_curve(cfg)


if __name__ == "__main__":
    main()
