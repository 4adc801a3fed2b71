"""How many tokens per second do batches make: without drafts, with fixed lengths, a head, and lengths that know the load?

    python benchmarks/batches.py [--head outputs/head/<date_time>/heads/<name>] [--model nano] [--sizes 1 4 16 64] [--repeats 3]

In each repeat all settings decode the same dev prompts in turn; a figure is the median over repeats, of whole runs with the
reading of prompts, and a ratio the median of those within repeats. No token ends a response, so that all settings emit the same
number. The policy on the load weighs tokens by what rounds cost, which is measured first, and predicts acceptance from the
draft's confidence, by a logistic fitted to recordings of others.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_result_option, prompt_record, text_of, write_result
from specheads import SpeculativeDecoder, Warp, load_head, load_pair
from specheads.decoding.batch.step_costs import measured_costs
from specheads.decoding.stopping import FixedLength, HeadThreshold
from specheads.evaluation.report import BatchRow
from specheads.evaluation.serving.batch_rows import batch_rows
from specheads.evaluation.serving.batch_settings import LOAD_AWARE, load_aware, predictions
from specheads.evaluation.serving.batch_sweep import ALONE, BatchSetting, BatchSweep, num_requests
from specheads.pair import Pair
from specheads.prompts.encoding import EncodedPrompt, ResponseLimits, encode_prompts
from specheads.prompts.nano_source import NanoSource
from specheads.replay.recording import Recording, load_recording, make_recording
from specheads.replay.response_tree import RecordSettings

FIXED = (1, 2, 4)
LEAST_REQUESTS = 32
WINDOW = 512  # positions of each row's memory


def recording_of(pair: Pair, prompts: Sequence[EncodedPrompt], warp: Warp, new_tokens: int, max_tokens: int) -> Recording:
    """Return a recording of prompts that no figure is measured on."""
    with tempfile.TemporaryDirectory() as folder:
        limits, settings = ResponseLimits(new_tokens), RecordSettings(num_samples=2, max_tokens=max_tokens)
        return load_recording(make_recording(pair, prompts, warp, limits, settings, 0, Path(folder)))


def settings_of(pair: Pair, warp: Warp, size: int, dev: Recording, arguments: argparse.Namespace) -> list[BatchSetting]:
    """Return what decodes, the target alone first and the policy on the load last."""
    settings = [ALONE, *(BatchSetting(f"fixed K={length}", "fixed_length", FixedLength(length)) for length in FIXED)]
    if arguments.head:
        head = load_head(arguments.head)
        rule = HeadThreshold(head, "auto" if head.config.recommended else 0.5, max_tokens=arguments.max_tokens)
        settings.append(BatchSetting("head", "head_threshold", rule))
    predicted = predictions(dev, {}, arguments.max_tokens)
    decoder = SpeculativeDecoder(pair, warp=warp, engine=arguments.engine, window=WINDOW)
    costs = measured_costs(decoder, size, arguments.max_tokens, predicted.read_out)
    return [*settings, load_aware(predicted, costs, arguments.max_tokens)]


def rows_of(size: int, rows: Sequence[BatchRow]) -> list[list[Value]]:
    """Return the rows of the table for one size."""
    best = max(row.over_alone for row in rows if row.family != LOAD_AWARE)
    return [
        [
            *(size, row.name, row.tokens_per_second, row.request_tokens_per_second),
            *(row.tokens_per_round, row.over_alone, row.over_alone / best),
        ]
        for row in rows
    ]


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
    dev = recording_of(pair, loaded[:48], warp, arguments.new_tokens, arguments.max_tokens)
    prompts, rows = loaded[48:], []
    for size in arguments.sizes:
        chosen = [ids for _, ids in prompts[: num_requests(LEAST_REQUESTS, size)]]
        settings = settings_of(pair, warp, size, dev, arguments)
        sweep = BatchSweep(pair, warp, arguments.new_tokens, size, arguments.repeats, 0, arguments.engine, (), WINDOW)
        rows += rows_of(size, batch_rows(settings, sweep.run(settings, chosen), range(len(chosen))))
        print(text_of(table_of(rows, arguments)), "\n", flush=True)
    used = [prompt.prompt_id for prompt, _ in prompts[: num_requests(LEAST_REQUESTS, max(arguments.sizes))]]
    write_result(arguments.result, [table_of(rows, arguments)], split="dev", seeds=[0], prompts=prompt_record(used))


def table_of(rows: Sequence[Sequence[Value]], arguments: argparse.Namespace) -> Table:
    columns = [Column("rows"), Column("setting"), Column("tokens/s", "fixed:0"), Column("tokens/s of a request", "fixed:0")]
    columns += [
        Column("tokens per round", "fixed:2"),
        Column("over target alone", "ratio:2"),
        Column("over the best without load-aware", "ratio:2"),
    ]
    mode = "greedy" if arguments.temperature == 0 else f"temperature {arguments.temperature:g}, top-k 50"
    return Table("batches", f"Batches of {arguments.model}, {mode}, median of {arguments.repeats}", columns, rows)


if __name__ == "__main__":
    with torch.no_grad():
        main()
