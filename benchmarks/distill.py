"""`python benchmarks/distill.py`: six losses, each on responses of the data set, of the target and of the draft.

Every training has as many steps, begins with nano's draft and is measured on the target's responses to held-out prompts. Prints a
table of overlaps with 95 % intervals over prompts. `--out` keeps the figures of each training; a rerun
computes only those that are missing.
"""

import argparse
import copy
import itertools
import json
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from lightning import Trainer
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, interval, prompt_record, text_of, write_result
from data_gen.settings import Generation
from specheads import Pair, load_pair
from specheads.commands.compose import settings_of, source_of
from specheads.commands.data import data_cache
from specheads.commands.distillation import distillation_of, responses_of
from specheads.evaluation.intervals import resample_counts
from specheads.evaluation.prompt_data import missing_remedy, split_of
from specheads.pair_config import config_folder
from specheads.prompts.encoding import encode_prompts
from specheads.prompts.prompt import groups_of
from specheads.training.distill.distill_module import DistillModule
from specheads.training.distill.distillation import prepare
from specheads.training.distill.divergences import DIVERGENCES
from specheads.training.distill.draft_quality import draft_quality, quality_sums
from specheads.training.distill.sample_splits import TrainTexts, load_splits
from specheads.training.distill.settings import KINDS, Distillation
from specheads.training.loaders import ResumableData
from specheads.training.trainer import CHATTER

COLUMNS = [
    Column("samples"),
    Column("loss"),
    Column("overlap", "fixed:4"),
    Column("gain", "signed_percent"),
    Column("KL", "fixed:3"),
    Column("agreement", "fixed:3"),
    Column("seconds", "fixed:0"),
]


def main() -> None:
    """Train what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/distill_losses"))
    parser.add_argument("--losses", nargs="*", default=list(DIVERGENCES))
    parser.add_argument("--samples", nargs="*", default=list(KINDS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    add_result_option(parser, "distill_losses")
    parser.add_argument("overrides", nargs="*", help="overrides of the config, such as generation.responses_per_prompt=4")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for message in (*CHATTER, ".*"):
        warnings.filterwarnings("ignore", message)
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        cfg = compose("train", ["task=distill", "paths.run=unused", *given.overrides])
    provenance = {"steps": given.steps, "seed": given.seed, "words": given.overrides}
    given.out.mkdir(parents=True, exist_ok=True)
    pair, settings = load_pair("nano"), distillation_of(cfg).but(seed=given.seed, validation={"live_prompts": 0})
    initial = copy.deepcopy(pair.draft.state_dict())
    for samples, divergence in itertools.product(given.samples, given.losses):
        path = given.out / f"{samples}-{divergence}.json"
        if not path.exists() or json.loads(path.read_text())["provenance"] != provenance:
            pair.draft.load_state_dict(initial)
            chosen = settings.but(samples=samples, loss=settings.loss.but(divergence=divergence))
            figures = train(cfg, pair, chosen, given.steps) | {"provenance": provenance}
            path.write_text(json.dumps(figures) + "\n")
            overlap = sum(figures["overlap"]) / sum(figures["tokens"])
            print(f"{samples:<12}{divergence:<18}{overlap:.4f}  {figures['seconds']:.0f} s", flush=True)
    test = split_of(source_of(cfg), pair, "test", missing_remedy("test"))
    prompts = [prompt for prompt, _ in encode_prompts(pair, test, settings_of(Generation, cfg).limits)]
    table = loss_table(given.out, given.samples, given.losses, given.steps, groups_of(prompts))
    print(f"{table.title}\n\n{text_of(table)}")
    write_result(
        given.result,
        [table],
        split="test, read before",
        seeds=[given.seed],
        prompts=prompt_record(prompt.prompt_id for prompt in prompts),
    )


def train(cfg: DictConfig, pair: Pair, settings: Distillation, steps: int) -> dict:
    """Return the figures by test prompt after `steps` steps, the overlap before, and the seconds that training took."""
    torch.manual_seed(settings.seed)
    data = responses_of(cfg, pair, settings, data_cache)
    splits, _ = load_splits(data, TrainTexts.of(data, pair, settings), settings)
    before = draft_quality(pair, splits.test, settings.warp, settings.loader.batch_size)["overlap"]
    prepare(pair.draft)
    module = DistillModule(pair, settings, data.limits.max_new_tokens)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        **quiet,
        use_distributed_sampler=False,
    )
    begin = time.perf_counter()
    trainer.fit(module, ResumableData(splits, **settings.loader.values(), seed=settings.seed, collate=list))
    seconds = time.perf_counter() - begin
    pair.draft.requires_grad_(False).eval()
    rows, cpu = splits.test, torch.device("cpu")
    sums = torch.stack([quality_sums(pair, [rows[0, row]], settings.warp, cpu) for row in range(len(rows))])
    return {
        "seconds": seconds,
        "before": before,
        "overlap": sums[:, 0].tolist(),
        "kl": sums[:, 1].tolist(),
        "agreement": sums[:, 2].tolist(),
        "tokens": sums[:, 3].tolist(),
    }


def loss_table(folder: Path, samples: list[str], losses: list[str], steps: int, groups: Sequence[str]) -> Table:
    """Return overlaps with 95 % intervals over prompts, KL divergences, agreements and seconds; `groups`: of each prompt."""
    rows = []
    for kind, divergence in itertools.product(samples, losses):
        figures = json.loads((folder / f"{kind}-{divergence}.json").read_text())
        overlap, tokens = np.array(figures["overlap"]), np.array(figures["tokens"])
        counts = resample_counts(groups)
        value = overlap.sum() / tokens.sum()
        limits = np.quantile(counts @ overlap / (counts @ tokens), [0.025, 0.975])
        kl, same = (sum(figures[name]) / tokens.sum() for name in ("kl", "agreement"))
        rows.append([kind, divergence, interval(value, *limits), value / figures["before"] - 1, kl, same, figures["seconds"]])
    return Table("losses", f"Each draft after {steps} steps; overlap on {len(tokens)} prompts", COLUMNS, rows)


if __name__ == "__main__":
    main()
