"""`python benchmarks/embedded_card.py nano`: recompute the figures on an embedded pair's card, and name those that differ.

On held-out functions of the standard library (none was trained on): the loss of both models per response token; along the
target's own sampled responses, how much the two distributions overlap; how many of the target's responses make the prompt a
Python function that parses; and the longest runs of tokens that 1,000 sampled responses share with the training text, which is
read from this machine. `--write` puts the figures into the card, and also what a step of the target costs in steps of the draft
on this machine, which must be quiet. Five to ten minutes on 2 cores.
"""

import argparse
import ast
import json
import statistics
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.steps import ALONE, DRAFT, WARPS, seconds_of, steps_of
from specheads import AcceptanceHead, HeadConfig, Pair, SpeculativeDecoder, Warp, load_pair
from specheads.decoding.responses import Responder, row_uniforms
from specheads.decoding.stopping import HeadThreshold
from specheads.embedded import corpus
from specheads.embedded.card import card
from specheads.embedded.copies import longest_copies
from specheads.embedded.sources import held_out_functions, shuffled_functions, training_sources
from specheads.embedded.tokens import tokenize
from specheads.embedded.training import response_loss
from specheads.prompts.encoding import ResponseLimits
from specheads.prompts.nano_source import NanoSource
from specheads.prompts.prompt import Prompt
from specheads.replay.draft_temperature import overlaps_at
from specheads.storage.files import write_whole

PAIRS = ("nano", "mini")
WARP = Warp(temperature=1.0, top_k=50)
NUM_RESPONSES, LONG_COPY = 1000, 50  # sampled responses that are searched for copies, and tokens of a copy that is counted


def main(argv: list[str] | None = None) -> int:
    """Print the figures next to the card's; the exit code is 1 where they differ."""
    parser = argparse.ArgumentParser(prog="benchmarks/embedded_card.py", description=__doc__.splitlines()[0])
    parser.add_argument("pair", choices=PAIRS)
    parser.add_argument("--folder", type=Path, help="where the pair and its card are (default: inside the package)")
    parser.add_argument("--prompts", type=int, default=300, help="test prompts for overlap and greedy responses")
    parser.add_argument("--responses", type=int, default=NUM_RESPONSES, help="sampled responses to search for copies")
    parser.add_argument("--write", action="store_true", help="put the figures into the card")
    arguments = parser.parse_args(argv)
    build = import_module(f"specheads.{arguments.pair}.build")
    recipe, folder = getattr(build, arguments.pair.upper()), arguments.folder or Path(build.__file__).parent
    parts = {"draft": folder / "draft", "target": folder / "target", "tokenizer": recipe.tokenizer or folder}
    pair = load_pair(**parts, dtype="float32", device="cpu")
    results = json.loads((folder / "training.json").read_text())
    figures = measure(pair, arguments.prompts) | copies(pair, arguments.responses)
    differing = 0
    print(f"{'':<60}{'now':>10}{'card':>10}")
    for name, value in figures.items():
        written = results.get("figures", {}).get(name)
        differing += value != written
        print(f"{name:<60}{value:>10}{'-' if written is None else written:>10}")
    if arguments.write:
        results["figures"] = figures | cost_ratios(pair)
        write_whole(folder / "training.json", lambda path: path.write_text(json.dumps(results, indent=2) + "\n"))
        write_whole(folder / "README.md", lambda path: path.write_text(card(recipe, results)))
        return 0
    return int(differing > 0)


def measure(pair: Pair, num_prompts: int) -> dict[str, float]:
    """Return losses, overlap and shares of responses, rounded as on the card."""
    figures = {}
    for split in ("dev", "test"):
        functions = list(corpus.standard_library(split))
        for role in ("target", "draft"):
            loss = response_loss(getattr(pair, role), pair.tokenizer, functions)
            figures[f"{split} loss of the {role}, nats per token"] = round(loss, 3)
    prompts = prompts_of("test", num_prompts)
    ids = [pair.encode_instruction(prompt.text) for prompt in prompts]
    sampled = responses(pair, prompts, ids, WARP, 128)
    texts_read = [(np.array(prompt), np.array(response.ids)) for prompt, response in zip(ids, sampled, strict=True)]
    present = pair.draft_lm.temperature
    figures["test prompts"] = len(prompts)
    figures["overlap of the two distributions, 1 - TV"] = round(overlaps_at(pair, texts_read, WARP, 16, (present,))[present], 3)
    greedy = responses(pair, prompts, ids, Warp(temperature=0), 256)
    texts = [prompt.text + pair.decode(response.ids) for prompt, response in zip(prompts, greedy, strict=True)]
    figures["greedy responses that end within 256 tokens"] = round(np.mean([response.finished for response in greedy]), 3)
    figures["greedy responses that parse"] = round(np.mean([parses(text) for text in texts]), 3)
    figures["sampled responses that parse"] = round(
        np.mean([parses(p.text + pair.decode(r.ids)) for p, r in zip(prompts, sampled, strict=True)]), 3
    )
    return figures


def copies(pair: Pair, num_responses: int) -> dict[str, float]:
    """Return what sampled responses to train prompts repeat of the text that an embedded pair of today would train on."""
    prompts = prompts_of("train", num_responses)
    ids = [pair.encode_instruction(prompt.text) for prompt in prompts]
    made = [response.ids[:-1] if response.finished else response.ids for response in responses(pair, prompts, ids, WARP, 256)]
    text = tokenize(pair.tokenizer, shuffled_functions(training_sources(held_out_functions()), 0)).numpy()
    longest = longest_copies(text, made)
    return {
        "sampled responses that are searched for copies of training text": len(made),
        "longest copy, tokens": int(longest.max()),
        f"responses with a copy of {LONG_COPY} tokens or more": int((longest >= LONG_COPY).sum()),
    }


def cost_ratios(pair: Pair) -> dict[str, float]:
    """Return by mode the median time of a step of the target alone over that of a draft step, at 256 positions."""
    head = AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size)).requires_grad_(False)
    ratios, threads = {}, torch.get_num_threads()
    for mode, warp in WARPS.items():
        decoder = SpeculativeDecoder(pair, stopping=HeadThreshold(head), warp=warp)
        steps = steps_of(decoder, 256)
        rounds = [seconds_of(steps, pair.target_lm.device, 10) for _ in range(5)]
        ratio = statistics.median(seconds[ALONE] / seconds[DRAFT] for seconds in rounds)
        ratios[f"a step of the target in steps of the draft, {mode}, in float32 with {threads} threads"] = round(ratio, 1)
    return ratios


def prompts_of(split: str, count: int) -> list[Prompt]:
    """Return prompts of the standard library that no embedded pair was trained on."""
    counts = {"train": 0, "dev": 0, "test": 0} | {split: count}
    return [prompt for prompt in NanoSource(*counts.values()).load(False) if prompt.split == split]


def responses(pair: Pair, prompts: Sequence[Prompt], ids: list[list[int]], warp: Warp, limit: int) -> list:
    """Return the target's response to each prompt."""
    uniform = np.stack([row_uniforms(0, prompt.prompt_id, limit)[0] for prompt in prompts])
    return Responder(pair, list(map(len, ids)), ResponseLimits(limit)).respond(ids, uniform, warp)


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
