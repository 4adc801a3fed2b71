"""Which kind of head decides best? Trains heads on one data cache and compares them on rollouts of the test prompts.

    python benchmarks/head_kinds.py [--rollouts 8] [--epochs 6]

A rollout drafts 20 tokens from a random position of a target response and knows the true acceptance probability of each.
A rule's throughput then follows without decoding: it stops somewhere, and the expected number of accepted tokens is a sum
of products of those probabilities, with no coin flips in between. (Rounds here start at random positions, while a decoder's
start where the last one ended; that shifts all rules alike.) The threshold of each head, and the fixed length, are chosen on
half of the prompts and judged on the other half.
"""

import argparse
import logging
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import numpy as np
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from data_gen.__main__ import data_cache
from data_gen.generate import left_padded
from data_gen.shards import load_split
from specheads import Pair, Warp, load_pair
from specheads.decoding.drafting import drafting_features
from specheads.decoding.engine import EagerEngine
from specheads.decoding.stopping import FixedLength, HeadThreshold, StoppingRule
from specheads.decoding.verification.block import reflected
from specheads.evaluation.intervals import cross_fitted_gain
from specheads.heads.bank import HeadBank, HeadSpec
from specheads.heads.features import collate
from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.heads.metrics import auroc
from specheads.heads.module import HeadModule
from specheads.heads.texts import MixedResponses
from specheads.loading import ResumableData
from specheads.pair import config_folder
from specheads.replay.cost import Costs
from specheads.sampling import sample, uniforms
from specheads.training import OptimizerSettings

LENGTH = 20
RATIOS = (5, 10, 20)
THRESHOLDS = np.round(np.arange(0.05, 1.0, 0.05), 2)
NEEDS = frozenset({"hidden", "embedding", "draft_prob", "max_prob", "entropy"})


@dataclass(frozen=True)
class Rollouts:
    """R drafts of LENGTH tokens: what rules see at each step, log t / d of each token (R, LENGTH), prompt numbers (R,)."""

    steps: list[dict[str, Tensor]]
    log_ratio: Tensor
    prompt: np.ndarray

    @property
    def accept(self) -> Tensor:
        """The chance that token verification accepts each token once all before it are (R, LENGTH)."""
        return self.log_ratio.clamp_max(0).exp()

    @property
    def survival(self) -> Tensor:
        """The chance that at least so many tokens are accepted by token verification (R, LENGTH)."""
        return self.accept.cumprod(1)

    @property
    def block_survival(self) -> Tensor:
        """The same for block verification, however long the draft becomes (R, LENGTH)."""
        return reflected(self.log_ratio).exp()


@torch.no_grad()
def make_rollouts(pair: Pair, rows, warp: Warp, per_prompt: int, seed: int = 0, batch_size: int = 64) -> Rollouts:
    """Draft from random positions of the responses in `rows`."""
    rng = np.random.default_rng(seed)
    contexts, prompt = [], []
    for number, row in enumerate(rows):
        for start in rng.integers(0, len(row["response_ids"]), per_prompt):
            contexts.append([*row["prompt_ids"], *row["response_ids"][:start]])
            prompt.append(number)
    generator = torch.Generator().manual_seed(seed)
    parts, ratios = [], []
    for begin in range(0, len(contexts), batch_size):
        steps, log_ratio = _rollout_batch(pair, contexts[begin : begin + batch_size], warp, generator)
        parts.append(steps)
        ratios.append(log_ratio)
    steps = [{name: torch.cat([part[i][name] for part in parts]) for name in NEEDS} for i in range(LENGTH)]
    return Rollouts(steps, torch.cat(ratios), np.array(prompt))


def _rollout_batch(pair: Pair, contexts: list, warp: Warp, generator: torch.Generator) -> tuple[list, Tensor]:
    tokens, mask = left_padded(contexts, pair.draft_lm.device)
    width = tokens.shape[1]
    mask = torch.cat([mask, mask.new_ones((len(contexts), LENGTH))], dim=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    engine = EagerEngine(pair.draft_lm, width + LENGTH)
    steps, drafted, laws = [], [], []
    now = tokens
    for i in range(LENGTH):
        end = width + i
        output = engine.forward(now, positions=positions[:, end - now.shape[1] : end], attention_mask=mask[:, :end])
        law = warp(output.logits[:, -1])
        token = sample(law, uniforms((len(contexts),), generator))
        steps.append(drafting_features(pair.draft_lm, NEEDS, output.logits[:, -1], token, output.hidden[:, -1]))
        drafted.append(token)
        laws.append(law.gather(1, token[:, None]).squeeze(1))
        now = token[:, None]
    drafted = torch.stack(drafted, 1)
    hidden = pair.target_lm.hidden_states(
        torch.cat([tokens, drafted], 1), position_ids=positions, attention_mask=mask, use_cache=False
    )[:, width - 1 : -1]
    target = warp(pair.target_lm.logits(hidden)).gather(2, drafted[..., None]).squeeze(2)
    return steps, target.double().log() - torch.stack(laws, 1).double().log()


@torch.no_grad()
def drafted_lengths(rule: StoppingRule, rollouts: Rollouts) -> Tensor:
    """Return where a rule stops in each rollout (R,)."""
    batch = len(rollouts.prompt)
    state = rule.init(batch, torch.device("cpu"))
    length = torch.full((batch,), LENGTH)
    for i, features in enumerate(rollouts.steps):
        state, stop = rule.step(state, features)
        length = torch.where(stop & (length == LENGTH), i + 1, length).clamp_max(LENGTH)
    return length


def totals(rule: StoppingRule, rollouts: Rollouts, survival: Tensor) -> np.ndarray:
    """Return (P, 4): expected emitted tokens, draft forwards, rounds and drafted tokens of each prompt's rollouts under a rule."""
    length = drafted_lengths(rule, rollouts)
    within = torch.arange(LENGTH) < length[:, None]
    tokens = 1 + (survival * within).sum(1)
    columns = (tokens, length, torch.ones_like(length), length)
    return np.stack([np.bincount(rollouts.prompt, weights=column.double().numpy()) for column in columns], axis=1)


@torch.no_grad()
def rollout_auroc(head: AcceptanceHead, rollouts: Rollouts, depth: int = 6) -> float:
    """Return the AUROC on the first `depth` tokens of each rollout, where rounds are still alive."""
    shift = 1 if head.config.judges == "input_token" else 0
    scores = torch.cat([head(rollouts.steps[i + shift]) for i in range(depth)])
    return auroc(scores, torch.cat([rollouts.accept[:, i] for i in range(depth)]))


def train_bank(pair: Pair, folder: Path, specs: list[HeadSpec], share: float, epochs: int) -> HeadBank:
    """Train heads of one kind and label on one mixing share."""
    first = specs[0].config
    splits = {s: MixedResponses(load_split(folder, s), first.judges, share, 0, [first.label]) for s in ("train", "dev", "test")}
    module = HeadModule(HeadBank(specs, 0), pair.draft_lm, OptimizerSettings(lr=1e-3))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", num_sanity_val_steps=0, limit_val_batches=0, **quiet)
    trainer.fit(module, ResumableData(splits, 32, 0, 0, collate))
    return module.bank.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=8, help="per test prompt")
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        cfg = compose("data_gen", overrides=["model=nano"])
    pair, warp = load_pair("nano"), Warp(**cfg.warp)
    folder = data_cache(cfg, pair)
    rollouts = make_rollouts(pair, load_split(folder, "test"), warp, arguments.rollouts)
    fixed = np.stack([totals(FixedLength(k), rollouts, rollouts.survival) for k in range(1, LENGTH + 1)])
    for ratio in RATIOS:
        tokens, drafted, rounds = fixed.sum(axis=1).T
        speeds = tokens / (drafted / ratio + rounds)
        print(f"ratio {ratio}: best fixed K = {int(speeds.argmax()) + 1}, {speeds.max():.3f}x")
    size = pair.draft_lm.hidden_size
    print(f"{'head':<44}{'AUROC':>7}" + "".join(f"{f'gain at {r}':>26}" for r in RATIOS))
    kinds = [("input_token", 0.15, "sampled"), ("input_token", 0.5, "sampled"), ("next_token", 0.15, "sampled")]
    kinds += [("next_token", 0.5, "sampled"), ("next_token", 1.0, "sampled"), ("next_token", 1.0, "overlap")]
    for judges, share, label in kinds:
        grid = [(d, w) for d in (0, 1, 3) for w in (1.0, 6.0)]
        specs = [HeadSpec(f"d{d}-r{w:g}", HeadConfig(size, d, judges, label=label), 1.0, w) for d, w in grid]
        bank = train_bank(pair, folder, specs, share, arguments.epochs)
        for name, head in bank.heads.items():
            row = f"{f'{judges} share={share} {label} {name}':<44}{rollout_auroc(head, rollouts):7.3f}"
            family = np.stack([totals(HeadThreshold(head, t), rollouts, rollouts.survival) for t in THRESHOLDS])
            for ratio in RATIOS:
                gain = cross_fitted_gain(family, fixed, Costs.at_ratio(ratio))
                row += f"{f'{gain.value - 1:+.1%} [{gain.low - 1:+.1%}, {gain.high - 1:+.1%}]':>26}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
