"""`python benchmarks/distill_recipes.py`: ways to distil nano's draft, each from an empty folder, and its overlap after them.

Every row is `specheads distill` with some settings, its data included in the minutes, the search for functions not.
Overlaps are along the target's sampled responses to nano's dev prompts, on which a recipe is chosen, and to its test prompts;
intervals are over groups of prompts. `--recipes` names some; a recipe that is kept under `--out` is not trained again.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import ROOT
from benchmarks.results import Column, Table, Value, add_result_option, interval, prompt_record, text_of, write_result
from specheads import Pair, Warp, load_pair
from specheads.decoding.responses import Responder, row_uniforms
from specheads.evaluation.intervals import resample_counts
from specheads.language_model import draft_temperature
from specheads.prompts.encoding import ResponseLimits
from specheads.prompts.nano_source import NanoSource
from specheads.prompts.prompt import Prompt, groups_of
from specheads.replay.response_batch import ResponseBatch
from specheads.sampling import overlap
from specheads.storage.files import write_json

WARP, NUM_TOKENS = Warp(temperature=1.0, top_k=50), 128
COUNTS = {"dev": 200, "test": 300}
FOUR = ("generation.responses_per_prompt=4",)
FUNCTIONS = (  # prompts that the pair was trained on
    *("data=alpaca", "data.path={out}/functions.jsonl", "data.template='{{prompt}}'", "data.response_template='{{body}}'"),
    *("data.num_train=12800", "data.num_dev=200", "data.num_test=300", "data.max_new_tokens=128", "data.max_prompt_tokens=256"),
)
RECIPES = {
    "12 epochs over one response": (),
    "6 epochs over four responses": (*FOUR, "trainer.max_epochs=6"),
    "the same with Muon": (*FOUR, "trainer.max_epochs=6", "optimizer.name=muon"),
    "Muon at half the rate": (*FOUR, "trainer.max_epochs=6", "optimizer.name=muon", "optimizer.matrix_lr=0.005"),
    "Muon at twice the rate": (*FOUR, "trainer.max_epochs=6", "optimizer.name=muon", "optimizer.matrix_lr=0.02"),
    "Muon, 12 epochs": (*FOUR, "trainer.max_epochs=12", "optimizer.name=muon"),
    "12,800 training functions, Muon, 6 epochs": (*FUNCTIONS, "trainer.max_epochs=6", "optimizer.name=muon"),
}
COLUMNS = [
    Column("recipe"),
    Column("minutes", "fixed:1"),
    Column("of it training", "fixed:1"),
    Column("temperature", "fixed:2"),
    Column("overlap on dev prompts", "fixed:4"),
    Column("gain", "signed_percent"),
    Column("overlap on test prompts", "fixed:4"),
    Column("gain there", "signed_percent"),
]


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "distill_recipes")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--seed", type=int, default=0)
    add_result_option(parser, "distill_recipes")
    given = parser.parse_args(argv)
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    texts = {split: texts_of(load_pair("nano"), split) for split in COUNTS}
    before = {split: overlaps(load_pair("nano"), *texts[split][1:]) for split in COUNTS}
    rows: list[list[Value]] = [["nano's own draft", None, None, 1.0, *cells(texts, before, before)]]
    for recipe in given.recipes:
        kept = trained(recipe, given.out, given.seed)
        pair = load_pair("nano", draft=kept["folder"])
        after = {split: overlaps(pair, *texts[split][1:]) for split in COUNTS}
        times = [kept["seconds"] / 60, kept["training_seconds"] / 60]
        rows.append([recipe, *times, draft_temperature(pair.draft), *cells(texts, before, after)])
        print(text_of(Table("recipes", "", COLUMNS, rows)), flush=True)
    settings = "; ".join(f"{recipe}: `{' '.join(RECIPES[recipe]) or 'nothing else'}`" for recipe in given.recipes)
    table = Table("recipes", "Nano's draft distilled on its target's responses, from an empty folder", COLUMNS, rows)
    prompts = prompt_record(prompt.prompt_id for split in COUNTS for prompt in texts[split][0])
    note = f"`specheads distill` with {settings}."
    write_result(given.result, [table], split="dev and test, read before", seeds=[given.seed], prompts=prompts, notes=note)


def trained(recipe: str, out: Path, seed: int) -> dict:
    """Return the folder of a recipe's draft and the seconds that it took, of all and of training; train it if it is missing."""
    name = "".join(each if each.isalnum() else "-" for each in recipe.lower())
    folder, kept = out / f"{name}-{seed}", out / f"{name}-{seed}.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    functions = out / "functions.jsonl"
    if FUNCTIONS[0] in RECIPES[recipe] and not functions.is_file():
        subprocess.run(
            [sys.executable, "-m", "specheads.mini.build", "--functions", functions, "--any-corpus"], check=True, cwd=ROOT
        )
    words = [word.format(out=out) for word in RECIPES[recipe]]
    words += ["model=nano", f"paths.data={folder / 'data'}", f"paths.run={folder}", f"seed={seed}"]
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed, whose data would not be counted
    start = time.perf_counter()
    subprocess.run([sys.executable, ROOT / "train.py", "task=distill", *words], check=True, cwd=ROOT)
    seconds = time.perf_counter() - start
    training = json.loads((folder / "draft" / "distill.json").read_text())["seconds"]
    content = {"folder": str(folder / "draft"), "seconds": seconds, "training_seconds": training}
    write_json(kept, content)
    return content


def texts_of(pair: Pair, split: str) -> tuple[list[Prompt], list[np.ndarray], list[np.ndarray]]:
    """Return prompts, their ids, and the target's sampled responses to them."""
    counts = {"train": 0, "dev": 0, "test": 0} | {split: COUNTS[split]}
    prompts = [prompt for prompt in NanoSource(*counts.values()).load(False) if prompt.split == split]
    ids = [pair.encode_instruction(prompt.text) for prompt in prompts]
    uniform = np.stack([row_uniforms(0, prompt.prompt_id, NUM_TOKENS)[0] for prompt in prompts])
    made = Responder(pair, list(map(len, ids)), ResponseLimits(NUM_TOKENS)).respond(ids, uniform, WARP)
    return prompts, [np.array(each) for each in ids], [np.array(response.ids) for response in made]


@torch.no_grad()
def overlaps(pair: Pair, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> np.ndarray:
    """Return by prompt the sum of overlaps over its response's tokens, and their number: (P, 2)."""
    rows = []
    for text in zip(prompts, responses, strict=True):
        batch = ResponseBatch.of(*([each] for each in text), torch.device("cpu"))
        shares = overlap(*(WARP(lm.logits(batch.states(lm))) for lm in (pair.target_lm, pair.draft_lm)))
        rows.append([shares.sum().item(), len(shares)])
    return np.array(rows)


def cells(texts: dict, before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> list[Value]:
    """Return overlap and gain on dev and on test prompts, overlaps with 95 % intervals."""
    values: list[Value] = []
    for split in COUNTS:
        sums, number = after[split].T
        resampled = resample_counts(groups_of(texts[split][0]))
        shares = (resampled @ sums) / (resampled @ number)
        mean = sums.sum() / number.sum()
        values.append(interval(mean, *np.quantile(shares, [0.025, 0.975])))
        values.append(mean / (before[split][:, 0].sum() / before[split][:, 1].sum()) - 1)
    return values


if __name__ == "__main__":
    main()
