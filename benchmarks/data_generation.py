"""How much faster are batched target responses than one prompt at a time?

    python benchmarks/data_generation.py [--prompts 512] [--repeats 3] [--engine auto] [--vllm-python .vllm/bin/python]

One process; the batch sizes take turns, and a figure is the median over repeats. Batch size 1 decodes a smaller share of the
prompts, the same ones each time. Prints tokens per second and the ratio to batch size 1. With an interpreter that has vLLM,
`runner=vllm` takes its turn, too: from its first response to its last, and with its start.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, prompt_record, text_of, write_result
from data_gen.rows import Shard
from data_gen.settings import Generation
from data_gen.vllm_runner import VllmResponses
from specheads import Pair, Warp, load_pair
from specheads.decoding.responses import Responder, row_uniforms
from specheads.prompts.encoding import EncodedPrompt, ResponseLimits
from specheads.prompts.nano_source import NanoSource

MAX_NEW_TOKENS, WARP = 128, Warp(1.0, 50)
BATCH_SIZES, VLLM_ROWS = (1, 64, 128), 64


def tokens_per_second(responder: Responder, prompts) -> float:
    """Return the speed of one pass over `prompts` = [(id, token ids)]."""
    uniform = np.stack([row_uniforms(0, prompt_id, MAX_NEW_TOKENS)[0] for prompt_id, _ in prompts])
    start = time.perf_counter()
    made = responder.respond([ids for _, ids in prompts], uniform, WARP)
    return sum(len(response.ids) for response in made) / (time.perf_counter() - start)


def vllm_speeds(pair: Pair, prompts: Sequence[EncodedPrompt], python: str) -> tuple[float, float]:
    """Return the tokens per second that vLLM makes from its first response to its last, and with its start."""
    sizes = {"max_new_tokens": MAX_NEW_TOKENS, "vllm_python": python, "vllm_options": {"max_num_seqs": VLLM_ROWS}}
    settings, times = Generation(warp=WARP, runner="vllm", **sizes), [time.perf_counter()]
    shards = {"all": Shard(prompts)}
    with tempfile.TemporaryDirectory() as folder, VllmResponses(pair, shards, settings, Path(folder)) as responses:
        made = responses.of("all", lambda tokens, ended: times.append(time.perf_counter()))
    lengths = [len(response.ids) for response in made]
    start, first, *_, last = times
    return sum(lengths) / (last - first), sum(lengths) / (last - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=512, help="one shard of data_gen")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", default=None, help="of decoding; default: as for a data set of these prompts")
    parser.add_argument("--vllm-python", help="an interpreter with vLLM, to measure runner=vllm as well")
    add_result_option(parser, "data_generation")
    arguments = parser.parse_args()
    pair = load_pair("nano")
    encoded = [(p, pair.encode_instruction(p.text)) for p in NanoSource(arguments.prompts, 0, 0).load(pair.chats)]
    prompts = [(prompt.prompt_id, ids) for prompt, ids in encoded]
    lengths = [len(ids) for _, ids in prompts]
    responders = {
        size: Responder(pair, lengths, ResponseLimits(MAX_NEW_TOKENS, batch_size=size), engine=arguments.engine)
        for size in BATCH_SIZES
    }
    by_vllm = (f"vLLM, {VLLM_ROWS} at once", f"vLLM, {VLLM_ROWS} at once, with its start") if arguments.vllm_python else ()
    speeds: dict[int | str, list[float]] = {name: [] for name in (*BATCH_SIZES, *by_vllm)}
    for responder in responders.values():
        tokens_per_second(responder, prompts[:16])  # warm-up
    for _ in range(arguments.repeats):
        for size in BATCH_SIZES:
            share = prompts[:: max(1, len(prompts) // 16)] if size == 1 else prompts
            speeds[size].append(tokens_per_second(responders[size], share))
        if arguments.vllm_python:
            for name, speed in zip(by_vllm, vllm_speeds(pair, encoded, arguments.vllm_python), strict=True):
                speeds[name].append(speed)
    medians = {size: statistics.median(values) for size, values in speeds.items()}
    table = Table(
        "speed",
        f"Responses to {len(prompts)} prompts of nano, at most {MAX_NEW_TOKENS} tokens each, median of {arguments.repeats}",
        [Column("batch size"), Column("tokens/s", "fixed:0"), Column("over one at a time", "ratio:1")],
        [[str(size), value, value / medians[1]] for size, value in medians.items()],
    )
    print(f"{table.title}\n\n{text_of(table)}")
    write_result(
        arguments.result, [table], split="train", seeds=[0], prompts=prompt_record(prompt_id for prompt_id, _ in prompts)
    )


if __name__ == "__main__":
    main()
