"""Do heads that were trained for token verification serve block verification, and do labels of its own serve it better?

    python benchmarks/block_heads.py --head outputs/head/<date_time>/heads/<name> [--rollouts 8] [--train-rollouts 4]

Judged on rollouts of the test prompts as in head_kinds.py. Under block verification the first i tokens of a draft survive with
`p_i = min(1, p_{i-1} t / d)` however long the draft becomes, so a rule's throughput follows without decoding here too. A block's label
is `p_i / p_{i-1}`, at most 1; weighted by survival, a position counts with the chance that the tokens before it survive.
"""

import argparse

import numpy as np
import torch
from head_kinds import LENGTH, NEEDS, RATIOS, THRESHOLDS, Rollouts, make_rollouts, rollout_auroc, totals
from hydra import compose, initialize_config_dir
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from data_gen.__main__ import data_cache
from data_gen.shards import load_split
from specheads import AcceptanceHead, HeadConfig, Warp, load_head, load_pair
from specheads.decoding.stopping import FixedLength, HeadThreshold
from specheads.evaluation.intervals import cross_fitted_gain
from specheads.pair import config_folder
from specheads.replay.cost import Costs

EPOCHS, BATCH_SIZE = 6, 512


def train(size: int, rollouts: Rollouts, labels: Tensor, weights: Tensor, seed: int) -> AcceptanceHead:
    """Train a look-ahead head on rollouts with soft labels and weights of positions, (R, LENGTH) each."""
    torch.manual_seed(seed)
    head = AcceptanceHead(HeadConfig(size))
    features = {name: torch.stack([step[name] for step in rollouts.steps], dim=1).flatten(0, 1) for name in NEEDS}
    inputs, labels, weights = head.assemble(features), labels.flatten().float(), weights.flatten().float()
    head.standardise(inputs)
    steps = EPOCHS * (len(inputs) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps + EPOCHS)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs)).split(BATCH_SIZE):
            if len(rows) == BATCH_SIZE:
                optimizer.zero_grad()
                losses = binary_cross_entropy_with_logits(head.score(inputs[rows]), labels[rows], weights[rows], reduction="sum")
                (losses / weights[rows].sum()).backward()
                optimizer.step()
                schedule.step()
    return head.eval().requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", required=True, help="a folder that train.py exported, for nano")
    parser.add_argument("--rollouts", type=int, default=8, help="per test prompt")
    parser.add_argument("--train-rollouts", type=int, default=4, help="per training prompt")
    arguments = parser.parse_args()
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        cfg = compose("data_gen", overrides=["model=nano"])
    pair, warp = load_pair("nano"), Warp(**cfg.warp)
    folder = data_cache(cfg, pair)
    training = make_rollouts(pair, load_split(folder, "train"), warp, arguments.train_rollouts, seed=1)
    rollouts = make_rollouts(pair, load_split(folder, "test"), warp, arguments.rollouts)
    alive = {
        name: torch.nn.functional.pad(survival, (1, 0), value=1.0)[:, :LENGTH]
        for name, survival in (("token", training.survival), ("block", training.block_survival))
    }
    labels = {"token": training.accept, "block": (training.block_survival / alive["block"].clamp_min(1e-12)).clamp_max(1.0)}
    size = pair.draft_lm.hidden_size
    heads = {"exported, on target text": load_head(arguments.head)}
    for rule, label in labels.items():
        for seed in range(2):
            heads |= {f"{rule} labels, seed {seed}": train(size, training, label, torch.ones_like(label), seed)}
            heads |= {f"{rule} labels, weighted by survival, seed {seed}": train(size, training, label, alive[rule], seed)}
    print("| head | AUROC | verification | " + " | ".join(f"gain at {r}, best threshold" for r in RATIOS) + " |")
    print("|" + "---|" * (3 + len(RATIOS)))
    for rule, survival in (("token", rollouts.survival), ("block", rollouts.block_survival)):
        fixed = np.stack([totals(FixedLength(k), rollouts, survival) for k in range(1, LENGTH + 1)])
        shown = []
        for ratio in RATIOS:
            tokens, drafted, rounds = fixed.sum(axis=1).T
            speeds = tokens / (drafted / ratio + rounds)
            shown.append(f"{speeds.max():.3f}x at K = {int(speeds.argmax()) + 1}")
        print(f"| best fixed length | | {rule} | {' | '.join(shown)} |")
        for name, head in heads.items():
            family = np.stack([totals(HeadThreshold(head, t), rollouts, survival) for t in THRESHOLDS])
            shown = []
            for ratio in RATIOS:
                gain = cross_fitted_gain(family, fixed, Costs.at_ratio(ratio))
                tokens, drafted, rounds = family.sum(axis=1).T
                best = THRESHOLDS[int((tokens / (drafted / ratio + rounds)).argmax())]
                shown.append(f"{gain.value - 1:+.1%} [{gain.low - 1:+.1%}, {gain.high - 1:+.1%}], {best:.2f}")
            print(f"| {name} | {rollout_auroc(head, rollouts):.3f} | {rule} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
