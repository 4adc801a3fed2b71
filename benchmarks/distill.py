"""`python benchmarks/distill.py`: six losses, each on texts of the data set, of the target and of the draft itself, for as many steps.

Every draft begins as nano's own and is measured on the target's responses to held-out prompts. Prints a table of overlaps with 95 %
intervals over prompts; `--out` keeps the figures of each training, and a rerun goes on with those that are not there.
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
from hydra.utils import instantiate
from lightning import Trainer

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, interval, prompt_record, text_of, write_result
from data_gen.__main__ import generation_settings
from specheads import Warp, load_pair
from specheads.evaluation.intervals import resample_counts
from specheads.evaluation.prompt_data import missing_remedy, split_of
from specheads.pair import config_folder
from specheads.prompts.encoding import encode_prompts
from specheads.prompts.sources import groups_of
from specheads.training.distill.distill_loss import LossSettings
from specheads.training.distill.distill_module import DistillModule
from specheads.training.distill.distillation import load_samples, prepare
from specheads.training.distill.divergences import DIVERGENCES
from specheads.training.distill.measures import LiveSettings, measured, sums_of
from specheads.training.distill.on_policy import DraftResponses
from specheads.training.distill.samples import KINDS, SampleSettings
from specheads.training.loaders import ResumableData
from specheads.training.trainer import CHATTER, OptimizerSettings

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
    """Run what is not there yet and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/distill_losses"))
    parser.add_argument("--losses", nargs="*", default=list(DIVERGENCES))
    parser.add_argument("--samples", nargs="*", default=list(KINDS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    add_result_option(parser, "distill_losses")
    parser.add_argument("words", nargs="*", help="overrides of the config, such as generation.responses_per_prompt=4")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for message in (*CHATTER, ".*"):
        warnings.filterwarnings("ignore", message)
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        cfg = compose("train", ["task=distill", "paths.run=unused", *given.words])
    provenance = {"steps": given.steps, "seed": given.seed, "words": given.words}
    given.out.mkdir(parents=True, exist_ok=True)
    pair = load_pair("nano")
    start = copy.deepcopy(pair.draft.state_dict())
    for samples, loss in itertools.product(given.samples, given.losses):
        path = given.out / f"{samples}-{loss}.json"
        if not path.exists() or json.loads(path.read_text())["provenance"] != provenance:
            pair.draft.load_state_dict(start)
            found = train(cfg, pair, SampleSettings(samples), loss, given.steps, given.seed) | {"provenance": provenance}
            path.write_text(json.dumps(found) + "\n")
            print(
                f"{samples:<12}{loss:<18}{sum(found['overlap']) / sum(found['tokens']):.4f}  {found['seconds']:.0f} s", flush=True
            )
    test = split_of(instantiate(cfg.data.source), pair, "test", missing_remedy("test"))
    prompts = [prompt for prompt, _ in encode_prompts(pair, test, generation_settings(cfg))]
    table = loss_table(given.out, given.samples, given.losses, given.steps, groups_of(prompts))
    print(f"{table.title}\n\n{text_of(table)}")
    write_result(
        given.result,
        [table],
        split="test, read before",
        seeds=[given.seed],
        prompts=prompt_record(prompt.prompt_id for prompt in prompts),
    )


def train(cfg, pair, settings: SampleSettings, divergence: str, steps: int, seed: int) -> dict:
    """Return the overlaps by test prompt before and after so many steps, and the seconds that they took."""
    torch.manual_seed(seed)
    loss, warp = LossSettings(divergence), Warp(**cfg.warp)
    splits, _ = load_samples(cfg, pair, settings, loss)
    before = measured(pair, splits["test"], warp, cfg.loader.batch_size)["overlap"]
    prepare(pair.draft)
    own = DraftResponses(pair, warp, cfg.data.max_new_tokens, cfg.generation.batch_size, seed)
    optimizer = OptimizerSettings(lr=None, weight_decay=0.0).for_width(pair.draft_lm.hidden_size)
    module = DistillModule(pair, loss, optimizer, warp, own, cfg.refresh_every, live=LiveSettings(num_prompts=0))
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
    trainer.fit(module, ResumableData(splits, **cfg.loader, seed=seed, collate=list))
    seconds = time.perf_counter() - begin
    pair.draft.requires_grad_(False).eval()
    rows = splits["test"]
    sums = torch.stack([sums_of(pair, [rows[0, row]], warp, torch.device("cpu")) for row in range(len(rows))])
    return {
        "seconds": seconds,
        "before": before,
        "overlap": sums[:, 0].tolist(),
        "kl": sums[:, 1].tolist(),
        "agreement": sums[:, 2].tolist(),
        "tokens": sums[:, 3].tolist(),
    }


def loss_table(folder: Path, samples: list[str], losses: list[str], steps: int, groups: Sequence[str]) -> Table:
    """Return overlaps with 95 % intervals over prompts, KL divergences, agreements and seconds; `groups`: that of each test prompt."""
    rows = []
    for kind, loss in itertools.product(samples, losses):
        found = json.loads((folder / f"{kind}-{loss}.json").read_text())
        overlap, tokens = np.array(found["overlap"]), np.array(found["tokens"])
        counts = resample_counts(groups)
        value = overlap.sum() / tokens.sum()
        limits = np.quantile(counts @ overlap / (counts @ tokens), [0.025, 0.975])
        kl, same = (sum(found[name]) / tokens.sum() for name in ("kl", "agreement"))
        rows.append([kind, loss, interval(value, *limits), value / found["before"] - 1, kl, same, found["seconds"]])
    return Table("losses", f"Each draft after {steps} steps; overlap on {len(tokens)} prompts", COLUMNS, rows)


if __name__ == "__main__":
    main()
