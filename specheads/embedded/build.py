"""Train the models of an embedded pair: what `python -m specheads.nano.build` and `python -m specheads.mini.build` do.

It reads Python functions from this machine (corpus.py), then trains the models that have a recipe one after the other on the
same token stream; a distilled draft is added by `--draft`. The command logs the amount of work before it starts, resumes where it
was killed, and always yields the same weights on the same machine.
"""

import argparse
import hashlib
import json
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from specheads.embedded.card import card
from specheads.embedded.corpus import Function
from specheads.embedded.notice import notice
from specheads.embedded.recipe import PairRecipe, Recipe
from specheads.embedded.sources import (
    MOST_LINES,
    Row,
    Source,
    differences,
    held_out_functions,
    shuffled_functions,
    training_sources,
)
from specheads.embedded.tokens import tokenize, train_tokenizer
from specheads.embedded.training import dev_subset, fit, response_loss
from specheads.errors import UserError
from specheads.revisions import folder_revision
from specheads.storage.files import write_json, write_whole

logger = logging.getLogger(__name__)

HeldOut = dict[str, list[Function]]
DISTIL = "give the folder of a draft that specheads distill made for this pair's target"
STREAM, STREAM_CARD = "stream.npy", "stream.json"  # the tokenized text, kept while a build is under way


@dataclass(frozen=True)
class Text:
    """What both models train on: the tokenizer, the stream (N,) int16, and a row per source."""

    tokenizer: PreTrainedTokenizerBase
    stream: torch.Tensor
    rows: list[Row]


def main(pair: PairRecipe, argv: list[str] | None = None) -> int:
    """Build the pair and leave weights, card and a new tokenizer under `--out`; return the exit code."""
    arguments = parse(pair, argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        if arguments.pin and pair.manifest is not None:
            pin(pair.manifest)
        elif arguments.functions:
            write_functions(pair, arguments)
        elif arguments.notice:
            write_notice(pair, arguments)
        elif arguments.draft:
            adopt_draft(pair, arguments.draft, arguments.out)
        else:
            build(pair, arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parse(pair: PairRecipe, argv: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m specheads.{pair.name}.build", description=f"Train {' and '.join(pair.recipes)} of {pair.name}."
    )
    out = Path("outputs") / pair.name
    parser.add_argument("--out", type=Path, default=out, help="folder for models, card and checkpoints")
    for role, recipe in pair.recipes.items():
        tokens = f"{recipe.tokens_per_step:,} tokens each"
        parser.add_argument(f"--{role}-steps", type=int, default=recipe.steps, help=f"optimiser steps of the {role} ({tokens})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--functions",
        type=Path,
        help="write the training functions there as JSON lines, the prompts of a distillation; no training",
    )
    parser.add_argument("--notice", type=Path, help="write the licences of the training text there; no training")
    parser.add_argument("--draft", type=Path, help="add a draft that task=distill made for this pair's target; no training")
    parser.set_defaults(pin=False, any_corpus=False)
    if pair.manifest is not None:
        parser.add_argument("--any-corpus", action="store_true", help="train on what is installed, whatever the manifest names")
        parser.add_argument("--pin", action="store_true", help="write the manifest of what is installed, and train nothing")
    return parser.parse_args(argv)


def pin(manifest: Path) -> None:
    """Write the manifest of the text that is on this machine."""
    rows = [source.row for source in training_sources(held_out_functions())]
    write_whole(manifest, lambda path: path.write_text(manifest_text(rows)))
    logger.info("%s: %d sources, %d functions", manifest, len(rows), sum(row["functions"] for row in rows))


def write_functions(pair: PairRecipe, arguments: argparse.Namespace) -> None:
    """Write the pair's training functions as JSON lines with `prompt` and `body`, in the order they are trained in."""
    functions = shuffled_functions(checked_sources(pair, arguments), arguments.seed)
    lines = "".join(json.dumps({"prompt": function.prompt, "body": function.body}) + "\n" for function in functions)
    write_text(arguments.functions, lines)
    logger.info("%s: %d functions", arguments.functions, len(functions))


def write_notice(pair: PairRecipe, arguments: argparse.Namespace) -> None:
    """Write the licence texts of the pair's training text."""
    rows = [source.row for source in checked_sources(pair, arguments)]
    write_text(arguments.notice, notice(rows))
    logger.info("%s: licences of %d sources", arguments.notice, len(rows))


def adopt_draft(pair: PairRecipe, distilled: Path, out: Path) -> None:
    """Write a distilled draft next to the target in `out`, in the pair's type, and into the card.

    Raises:
        UserError: no target there, or a folder that is no distilled draft of the pair's shape for this target.
    """
    for path, what in ((out / "training.json", f"train the target first: --out {out}"), (distilled / "distill.json", DISTIL)):
        if not path.is_file():
            raise UserError(f"{path} is missing; {what}.")
    content = json.loads((distilled / "distill.json").read_text())
    if content["target"]["revision"] != folder_revision(out / "target"):
        raise UserError(
            f"{distilled} was distilled for another target than {out / 'target'}, {content['target']['id']}; {DISTIL}."
        )
    draft = LlamaForCausalLM.from_pretrained(distilled, dtype=torch.float32)
    expected = pair.new_model("draft", 0)
    if {n: w.shape for n, w in draft.state_dict().items()} != {n: w.shape for n, w in expected.state_dict().items()}:
        raise UserError(f"{distilled} is not of the shape of {pair.name}'s draft, {dict(pair.shapes['draft'])}; {DISTIL}.")
    new = out / "draft.new"  # the present draft stays until all is known of this one
    saved = save_model(draft.to(pair.dtype), new, AutoTokenizer.from_pretrained(pair.tokenizer or out), held_out_functions())
    results = json.loads((out / "training.json").read_text())
    results.pop("figures", None)  # of another draft
    figures = {"parameters": draft.num_parameters(), "seconds": round(content["seconds"])}
    results["draft"] = figures | saved | {"distilled": content}
    shutil.rmtree(out / "draft", ignore_errors=True)
    new.rename(out / "draft")
    write_json(out / "training.json", results)
    write_text(out / "README.md", card(pair, results))
    logger.info("%s: the draft of %s", out / "draft", distilled)


def save_model(model: LlamaForCausalLM, folder: Path, tokenizer: PreTrainedTokenizerBase, held_out: HeldOut) -> dict[str, Any]:
    """Write a model and return its revision and its losses as they will be loaded: casting one rounds its rotary angles, too."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    losses = {split: response_loss(loaded, tokenizer, held_out[split]) for split in held_out}
    return {"revision": folder_revision(folder), "loss": losses}


def write_text(path: Path, text: str) -> None:
    """Write a file into a folder that may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda temporary: temporary.write_text(text))


def checked_sources(pair: PairRecipe, arguments: argparse.Namespace) -> list[Source]:
    """Return the training text that is on this machine. Raises UserError if it is not what the pair is pinned to."""
    sources, pinned = training_sources(held_out_functions()), pinned_rows(pair)
    if pinned is not None and not arguments.any_corpus:
        check_pinned(pair, pinned, [source.row for source in sources])
    return sources


def manifest_text(rows: Sequence[Row]) -> str:
    """Return rows as JSON with one line each, so that a change of version is a change of one line."""
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def build(pair: PairRecipe, arguments: argparse.Namespace) -> None:
    """Train both models and write everything under `arguments.out`. Raises UserError if the text is not the pinned text."""
    start = time.perf_counter()
    held_out = held_out_functions()
    text = training_text(pair, held_out, arguments)
    logger.info("%d training functions, %d tokens", sum(row["functions"] for row in text.rows), len(text.stream))
    results: dict[str, Any] = {}
    for role, usual in pair.recipes.items():
        recipe = replace(usual, steps=getattr(arguments, f"{role}_steps"), seed=arguments.seed)
        results[role] = train_role(pair, role, recipe, text, held_out, arguments.out)
    results |= {"sources": text.rows, "corpus_tokens": len(text.stream), "total_seconds": round(time.perf_counter() - start)}
    write_json(arguments.out / "training.json", results)
    write_text(arguments.out / "README.md", card(pair, results))


def training_text(pair: PairRecipe, held_out: HeldOut, arguments: argparse.Namespace) -> Text:
    """Return what both models train on; if the pair has its own tokenizer, write it under `arguments.out`.

    The stream of a pinned text is kept there, too, so that packages may change during a run of hours.
    """
    pinned = pinned_rows(pair)
    tokenizer = None if pair.tokenizer is None else AutoTokenizer.from_pretrained(pair.tokenizer)
    if pinned is not None and not arguments.any_corpus:
        stream = kept_stream(arguments.out, pinned, arguments.seed)
        if stream is not None:
            return Text(tokenizer, stream, pinned)
    sources = training_sources(held_out)
    rows = [source.row for source in sources]
    if pinned is not None and not arguments.any_corpus:
        check_pinned(pair, pinned, rows)
    functions = shuffled_functions(sources, arguments.seed)
    if tokenizer is None:
        tokenizer = train_tokenizer([function.prompt + function.body for function in functions])
        tokenizer.save_pretrained(arguments.out)
    stream = tokenize(tokenizer, functions)
    if pinned is not None:
        keep_stream(arguments.out, stream, rows, arguments.seed)
    return Text(tokenizer, stream, rows)


def pinned_rows(pair: PairRecipe) -> list[Row] | None:
    """Return the manifest of a pair that has one."""
    return None if pair.manifest is None else json.loads(pair.manifest.read_text())


def check_pinned(pair: PairRecipe, pinned: Sequence[Row], rows: Sequence[Row]) -> None:
    """Raise UserError, naming what differs, unless `rows` are the pinned text."""
    lines = differences(pinned, rows)
    if lines:
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        listed = "\n".join(f"  {line}" for line in [*lines[:MOST_LINES], *more])
        raise UserError(
            f"{len(lines)} sources are not what {pair.name} is pinned to:\n{listed}\n"
            "Install the pinned versions, or train on what is installed with --any-corpus."
        )


def stream_card(stream: torch.Tensor, rows: Sequence[Row], seed: int) -> dict:
    """Return what identifies a stream: its text, the order of its functions, and a hash that detects damage."""
    return {"seed": seed, "sources": list(rows), "sha256": hashlib.sha256(stream.numpy().tobytes()).hexdigest()}


def keep_stream(out: Path, stream: torch.Tensor, rows: Sequence[Row], seed: int) -> None:
    """Write the stream first and its card last: where there is a card, the stream is complete."""
    with (out / STREAM).open("wb") as file:
        np.save(file, stream.numpy())
    write_json(out / STREAM_CARD, stream_card(stream, rows, seed))


def kept_stream(out: Path, rows: Sequence[Row], seed: int) -> torch.Tensor | None:
    """Return the stream of this text and seed that an earlier run kept, or None."""
    if not (out / STREAM).exists() or not (out / STREAM_CARD).exists():
        return None
    stream = torch.from_numpy(np.load(out / STREAM))
    return stream if json.loads((out / STREAM_CARD).read_text()) == stream_card(stream, rows, seed) else None


def train_role(pair: PairRecipe, role: str, recipe: Recipe, text: Text, held_out: HeldOut, out: Path) -> dict:
    """Train the target or the draft, write it to its folder under `out`, and return what the card says about it."""
    model = pair.new_model(role, recipe.seed)
    logger.info("%s: %d parameters, %d steps of %d tokens", role, model.num_parameters(), recipe.steps, recipe.tokens_per_step)
    watched = dev_subset(held_out["dev"])
    steps, seconds = 0, 0.0
    dev_losses: dict[int, float] = {}  # by the steps of all stages
    for number, stage in enumerate(recipe.stages, 1):
        checkpoint = out / f"{role}-{number}.ckpt"
        progress = fit(model, text.stream, stage, checkpoint, lambda trained: response_loss(trained, text.tokenizer, watched))
        dev_losses |= {steps + step: loss for step, loss in progress.dev_losses.items()}
        steps, seconds = steps + stage.steps, seconds + progress.seconds
    saved = save_model(model.to(pair.dtype), out / role, text.tokenizer, held_out)
    logger.info("%s: %s nats per response token, %.0f s", role, saved["loss"], seconds)
    tokens = sum(stage.tokens for stage in recipe.stages)
    results = {"parameters": model.num_parameters(), "recipe": asdict(recipe), "tokens": tokens}
    return results | {"seconds": round(seconds), **saved, "dev_losses": dev_losses}
