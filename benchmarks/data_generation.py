"""How much faster are batched target responses than one prompt at a time?

    python benchmarks/data_generation.py [--prompts 512] [--repeats 3] [--engine auto]

One process; the batch sizes take turns, and a figure is the median over repeats. Batch size 1 decodes a smaller share of the
prompts, the same ones each time. Prints tokens per second and the ratio to batch size 1.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, prompt_record, text_of, write_result
from specheads import Warp, load_pair
from specheads.decoding.responses import Responder, row_uniforms
from specheads.prompts.encoding import ResponseLimits
from specheads.prompts.nano_source import NanoSource

MAX_NEW_TOKENS = 128
BATCH_SIZES = (1, 64, 128)


def tokens_per_second(responder: Responder, prompts) -> float:
    """Return the speed of one pass over `prompts` = [(id, token ids)]."""
    uniform = np.stack([row_uniforms(0, prompt_id, MAX_NEW_TOKENS)[0] for prompt_id, _ in prompts])
    start = time.perf_counter()
    made = responder.respond([ids for _, ids in prompts], uniform, Warp(1.0, 50))
    return sum(len(response.ids) for response in made) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=512, help="one shard of data_gen")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", default=None, help="of decoding; default: as for a data set of these prompts")
    add_result_option(parser, "data_generation")
    arguments = parser.parse_args()
    pair = load_pair("nano")
    prompts = [(p.prompt_id, pair.encode_instruction(p.text)) for p in NanoSource(arguments.prompts, 0, 0).load(pair.chats)]
    lengths = [len(ids) for _, ids in prompts]
    responders = {
        size: Responder(pair, lengths, ResponseLimits(MAX_NEW_TOKENS, batch_size=size), engine=arguments.engine)
        for size in BATCH_SIZES
    }
    speeds = {size: [] for size in BATCH_SIZES}
    for responder in responders.values():
        tokens_per_second(responder, prompts[:16])  # warm-up
    for _ in range(arguments.repeats):
        for size in BATCH_SIZES:
            share = prompts[:: max(1, len(prompts) // 16)] if size == 1 else prompts
            speeds[size].append(tokens_per_second(responders[size], share))
    medians = {size: statistics.median(values) for size, values in speeds.items()}
    table = Table(
        "speed",
        f"Responses to {len(prompts)} prompts of nano, at most {MAX_NEW_TOKENS} tokens each, median of {arguments.repeats}",
        [Column("batch size"), Column("tokens/s", "fixed:0"), Column("over one at a time", "ratio:1")],
        [[size, value, value / medians[1]] for size, value in medians.items()],
    )
    print(f"{table.title}\n\n{text_of(table)}")
    write_result(
        arguments.result, [table], split="train", seeds=[0], prompts=prompt_record(prompt_id for prompt_id, _ in prompts)
    )


if __name__ == "__main__":
    main()
