"""How long do the paper's 20 heads take in one pass, against 20 separate runs and against one head?

    python benchmarks/bank.py [--prompts 512] [--repeats 3]

Times one epoch of training on nano (data is made where it is missing), alternating; medians. Then counts multiply-adds per token
at the shape of Llama 2 7B, where a step is a forward of the draft and three products (forward, two backward) for every weight of
a head.
"""

import argparse
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path

import lightning as L
from hydra import compose, initialize_config_dir

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, prompt_record, write_result
from specheads import load_pair
from specheads.commands.compose import settings_of
from specheads.commands.data import data_cache
from specheads.heads.batch import collate
from specheads.pair_config import config_folder
from specheads.storage.data_set import load_split
from specheads.training.heads.bank import HeadBank, HeadSpec
from specheads.training.heads.head_module import HeadModule
from specheads.training.heads.mixed_responses import MixedResponses
from specheads.training.heads.settings import HeadTraining
from specheads.training.loaders import ResumableData
from specheads.training.optimizer import Optimizer

LLAMA_2_7B = {"hidden": 4096, "multiply_adds": 6.61e9}  # per token: the weights of all linear maps, output embedding included
LABELLED = 0.85  # share of positions that a head that judges its input learns from, at the paper's mixing


def epoch_seconds(pair, rows, specs: list[HeadSpec]) -> float:
    """Return the seconds of one epoch."""
    data = ResumableData(
        {"train": MixedResponses(rows, specs[0].config.predicts, None, 0)}, batch_size=32, num_workers=0, seed=0, collate=collate
    )
    module = HeadModule(HeadBank(specs, 0), pair.draft_lm, Optimizer(lr=1e-3))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", num_sanity_val_steps=0, limit_val_batches=0, gradient_clip_val=1.0, **quiet
    )
    start = time.perf_counter()
    trainer.fit(module, data)
    return time.perf_counter() - start


def head_multiply_adds(depth: int, hidden: int) -> float:
    """Return the weights of a head that judges its input token."""
    return depth * hidden * (hidden + 1) + hidden + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    add_result_option(parser, "bank")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        cfg = compose("train", ["experiment=specdecpp_grid", "paths.run=."])
        data = compose("data_gen", ["model=nano"])
    pair = load_pair("nano")
    rows = load_split(data_cache(data, pair).folder, "train").select(range(arguments.prompts))
    specs = settings_of(HeadTraining, cfg).specs(pair)
    single = [next(spec for spec in specs if spec.config.depth == 3)]
    epoch_seconds(pair, rows.select(range(32)), specs)
    times = {"together": [], "apart": [], "one": []}
    for _ in range(arguments.repeats):
        times["together"].append(epoch_seconds(pair, rows, specs))
        times["one"].append(epoch_seconds(pair, rows, single))
        times["apart"].append(sum(epoch_seconds(pair, rows, [spec]) for spec in specs))
    together, apart, alone = (statistics.median(times[name]) for name in ("together", "apart", "one"))
    print(f"nano, {arguments.prompts} prompts, one epoch, median of {arguments.repeats}")
    print(
        f"20 heads in one pass {together:6.1f} s; in 20 runs {apart:6.1f} s: {together / apart:.2f} of it; one head {alone:.1f} s"
    )
    hidden, draft = LLAMA_2_7B.values()
    weights = {spec.name: head_multiply_adds(spec.config.depth, hidden) for spec in specs}
    steps = [draft + 3 * LABELLED * sum(some) for some in (weights.values(), [weights[single[0].name]])]
    print(f"at Llama 2 7B's shape, multiply-adds of a training step: {steps[0] / steps[1]:.2f} of one head's")
    tables = [
        Table(
            "time",
            f"One epoch over {arguments.prompts} prompts, median of {arguments.repeats}",
            [Column("what"), Column("seconds", "fixed:1"), Column("of 20 runs", "percent")],
            [
                ["20 heads in one pass", together, together / apart],
                ["20 heads in 20 runs", apart, 1.0],
                ["one head (depth 3)", alone, alone / apart],
            ],
        ),
        Table(
            "operations",
            "Multiply-adds of a training step at the shape of Llama 2 7B, counted",
            [Column("what"), Column("over a step of one head", "ratio")],
            [["20 heads in one pass", steps[0] / steps[1]]],
        ),
    ]
    write_result(arguments.result, tables, split="train", seeds=[0], prompts=prompt_record(rows["prompt_id"]))


if __name__ == "__main__":
    main()
