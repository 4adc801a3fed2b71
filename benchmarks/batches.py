"""How many tokens per second do batches make: without drafts, with fixed lengths, a head, and lengths that know the load?

    python benchmarks/batches.py [--head outputs/head/<date_time>/heads/<name>] [--model nano] [--sizes 1 4 16 64] [--repeats 3]

In each repeat all settings decode the same dev prompts in turn; a figure is the median over repeats, of whole runs with the
reading of prompts. No token ends a response, so that all settings emit the same number. The policy on the load weighs tokens by
what rounds cost, which is measured first, and predicts acceptance from the draft's confidence, by a logistic fitted to recordings
of others.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_result_option, prompt_record, text_of, write_result
from specheads import SpeculativeDecoder, Warp, load_head, load_pair
from specheads.decoding.baseline import Baseline
from specheads.decoding.batch.step_costs import measured_costs
from specheads.decoding.load.load_aware import LoadAware
from specheads.decoding.records import Generation
from specheads.decoding.stopping import FixedLength, HeadThreshold
from specheads.evaluation.serving.readouts import confidence_read_out, survival_sample
from specheads.pair import Pair
from specheads.prompts.encoding import EncodedPrompt, ResponseLimits, encode_prompts
from specheads.prompts.nano_source import NanoSource
from specheads.replay.recording import Recording, load_recording, make_recording
from specheads.replay.response_tree import RecordSettings

FIXED = (1, 2, 4)
ALONE, LOAD_AWARE = "target alone", "load-aware"
WINDOW = 512  # positions of each row's memory

Run = Callable[[], Iterator[tuple[int, Generation]]]


def recording_of(pair: Pair, prompts: Sequence[EncodedPrompt], warp: Warp, new_tokens: int, max_tokens: int) -> Recording:
    """Return a recording of prompts that no figure is measured on."""
    with tempfile.TemporaryDirectory() as folder:
        limits, settings = ResponseLimits(new_tokens), RecordSettings(num_samples=2, max_tokens=max_tokens)
        return load_recording(make_recording(pair, prompts, warp, limits, settings, 0, Path(folder)))


def runs_of(pair: Pair, warp: Warp, size: int, prompts: Sequence[list[int]], arguments: argparse.Namespace) -> dict[str, Run]:
    """Return what decodes all prompts, by setting."""
    dev, head = arguments.dev, arguments.head and load_head(arguments.head)
    decoder = SpeculativeDecoder(pair, warp=warp, engine=arguments.engine, window=WINDOW)
    alone = Baseline(pair, warp, arguments.engine, WINDOW)
    read_out = confidence_read_out(dev)
    costs = measured_costs(decoder, size, arguments.max_tokens, read_out)
    policy = LoadAware(costs, read_out, survival_sample(dev, read_out, arguments.max_tokens), arguments.max_tokens)
    rules = {f"fixed K={length}": FixedLength(length) for length in FIXED}
    if head is not None:
        rules["head"] = HeadThreshold(head, "auto" if head.config.recommended else 0.5, max_tokens=arguments.max_tokens)
    seeds = range(len(prompts))
    decoders = {name: decoder.with_stopping(rule) for name, rule in rules.items()}
    runs: dict[str, Run] = {ALONE: lambda: alone.generate_batch(prompts, size, arguments.new_tokens, seeds, ())}
    for name, each in decoders.items():
        runs[name] = lambda each=each: each.generate_batch(prompts, size, arguments.new_tokens, seeds, ())
    runs[LOAD_AWARE] = lambda: decoder.generate_batch(prompts, size, arguments.new_tokens, seeds, (), policy)
    return runs


def speeds_of(runs: Mapping[str, Run], repeats: int) -> dict[str, tuple[float, float]]:
    """Return tokens per second in total, and the median of those of a request, of every run."""
    for run in runs.values():
        next(run())  # compiles
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for repeat in range(repeats):
        names = list(runs)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            start = time.perf_counter()
            made = [generation.stats for _, generation in runs[name]()]
            seconds = time.perf_counter() - start
            of_request = statistics.median(stats.num_tokens / stats.seconds for stats in made)
            taken[name].append((sum(stats.num_tokens for stats in made) / seconds, of_request))
    return {name: tuple(map(statistics.median, zip(*values, strict=True))) for name, values in taken.items()}


def rows_of(size: int, speeds: Mapping[str, tuple[float, float]]) -> list[list[Value]]:
    """Return the rows of the table for one size."""
    best = max(total for name, (total, _) in speeds.items() if name != LOAD_AWARE)
    return [[size, name, total, each, total / speeds[ALONE][0], total / best] for name, (total, each) in speeds.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--head", type=Path, metavar="FOLDER", help="a head for this pair")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 4, 16, 64], help="rows of a batch")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy; otherwise with top-k 50")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=6, help="tokens per draft at most, with a head and load-aware")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--dtype", default="float32")
    add_result_option(parser, "batches")
    arguments = parser.parse_args()
    pair = load_pair(arguments.model, dtype=arguments.dtype)
    warp = Warp(temperature=arguments.temperature, top_k=50)
    loaded = encode_prompts(pair, list(NanoSource(0, 192, 0).load(pair.chats)), ResponseLimits(arguments.new_tokens))
    arguments.dev = recording_of(pair, loaded[:48], warp, arguments.new_tokens, arguments.max_tokens)
    prompts, rows = loaded[48:], []
    for size in arguments.sizes:
        chosen = [prompts[number % len(prompts)][1] for number in range(max(8, 2 * size))]
        rows += rows_of(size, speeds_of(runs_of(pair, warp, size, chosen, arguments), arguments.repeats))
        print(text_of(table_of(rows, arguments)), "\n", flush=True)
    used = [prompt.prompt_id for prompt, _ in prompts[: max(8, 2 * max(arguments.sizes))]]
    write_result(arguments.result, [table_of(rows, arguments)], split="dev", seeds=[0], prompts=prompt_record(used))


def table_of(rows: Sequence[Sequence[Value]], arguments: argparse.Namespace) -> Table:
    columns = [Column("rows"), Column("setting"), Column("tokens/s", "fixed:0"), Column("tokens/s of a request", "fixed:0")]
    columns += [Column("over target alone", "ratio:2"), Column("over the best without load-aware", "ratio:2")]
    mode = "greedy" if arguments.temperature == 0 else f"temperature {arguments.temperature:g}, top-k 50"
    return Table("batches", f"Batches of {arguments.model}, {mode}, median of {arguments.repeats}", columns, rows)


if __name__ == "__main__":
    with torch.no_grad():
        main()
