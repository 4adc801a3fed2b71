"""How well does the simulation of batches predict the batched decoder?

    python benchmarks/simulated_batches.py [--model nano] [--sizes 1 4 16] [--repeats 3] [--temperature 0]

Measures what rounds cost, records responses to dev prompts, simulates the same requests on the recording at these costs, and
decodes them. A figure is the median over repeats in turn. Greedily both take the same rounds, so that only the costs can differ;
with sampling the decoder draws responses of its own.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_result_option, prompt_record, text_of, write_result
from specheads import SpeculativeDecoder, Warp, load_pair
from specheads.decoding.batch.step_costs import measured_costs
from specheads.decoding.load.costs import LoadCosts
from specheads.decoding.load.lengths import FixedK
from specheads.decoding.load.policy import LoadPolicy
from specheads.evaluation.serving.batch_settings import Predictions, load_aware, predictions
from specheads.evaluation.serving.batch_sweep import ALONE, BatchSetting, BatchSweep, num_requests
from specheads.evaluation.serving.recorded_drafts import RecordedDrafts
from specheads.evaluation.serving.simulation import Simulation
from specheads.evaluation.serving.traffic import Traffic
from specheads.pair import Pair
from specheads.prompts.encoding import EncodedPrompt, ResponseLimits, encode_prompts
from specheads.prompts.nano_source import NanoSource
from specheads.replay.recording import Recording, load_recording, make_recording
from specheads.replay.response_tree import RecordSettings

FIXED = (1, 2, 4)
NUM_FITTED, NUM_REQUESTS = 48, 64  # prompts that predictions are fitted on; others, which are decoded
WINDOW = 512  # positions of each row's memory


def recording_of(pair: Pair, prompts: Sequence[EncodedPrompt], arguments: argparse.Namespace) -> Recording:
    """Return what can be drafted along the responses to prompts."""
    with tempfile.TemporaryDirectory() as folder:
        settings = RecordSettings(num_samples=2, max_tokens=arguments.max_tokens)
        limits, warp = ResponseLimits(arguments.new_tokens), warp_of(arguments)
        return load_recording(make_recording(pair, prompts, warp, limits, settings, 0, Path(folder)))


def warp_of(arguments: argparse.Namespace) -> Warp:
    return Warp(temperature=arguments.temperature, top_k=50)


def settings_of(predicted: Predictions, costs: LoadCosts, max_tokens: int) -> list[BatchSetting]:
    """Return what decodes: the target alone, fixed lengths as policies, and the policy that knows the load."""
    fixed = [BatchSetting(f"fixed K={length}", "fixed_length", policy=FixedK(length)) for length in FIXED]
    return [ALONE, *fixed, load_aware(predicted, costs, max_tokens)]


def simulated_speed(policy: LoadPolicy, recording: Recording, costs: LoadCosts, size: int, count: int) -> float:
    """Return the tokens per second of `count` requests, which begin with their prompts, in the order of the recording."""
    prompts = np.arange(count) % recording.num_prompts
    traffic = Traffic(prompts, np.arange(count) % recording.num_samples, np.zeros(count, dtype=np.int64), size)
    simulation = Simulation(RecordedDrafts(recording, policy.needs), traffic, costs, policy)
    simulation.run()
    return float(recording.lengths.numpy()[prompts].sum()) / simulation.now


def rows_of(
    size: int, pair: Pair, dev: Recording, recording: Recording, prompts: Sequence[Sequence[int]], arguments: argparse.Namespace
) -> list[list[Value]]:
    """Return the rows of the table for one size."""
    predicted, warp = predictions(dev, {}, arguments.max_tokens), warp_of(arguments)
    decoder = SpeculativeDecoder(pair, warp=warp, engine=arguments.engine, window=WINDOW)
    costs = measured_costs(decoder, size, arguments.max_tokens, predicted.read_out)
    settings = settings_of(predicted, costs, arguments.max_tokens)
    sweep = BatchSweep(pair, warp, arguments.new_tokens, size, arguments.repeats, 0, arguments.engine, None, WINDOW)
    live = [statistics.median(run.tokens_per_second for run in runs) for runs in sweep.run(settings, prompts)]
    policies = [
        FixedK(0) if setting.policy is None else setting.policy for setting in settings_of(predicted, costs, arguments.max_tokens)
    ]
    made = [simulated_speed(policy, recording, costs, size, num_requests(len(prompts), size)) for policy in policies]
    return [[size, setting.name, there, here, here / there] for setting, there, here in zip(settings, live, made, strict=True)]


def table_of(rows: Sequence[Sequence[Value]], arguments: argparse.Namespace) -> Table:
    columns = [
        Column("rows"),
        Column("setting"),
        Column("decoded, tokens/s", "fixed:0"),
        Column("simulated, tokens/s", "fixed:0"),
    ]
    mode = "greedy" if arguments.temperature == 0 else f"temperature {arguments.temperature:g}, top-k 50"
    title = f"Batches of {arguments.model}, {mode}, median of {arguments.repeats}"
    return Table("speeds", title, [*columns, Column("simulated over decoded", "ratio:2")], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 4, 16], help="rows of a batch")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy; otherwise with top-k 50")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--max-tokens", type=int, default=6, help="tokens per draft at most, load-aware")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", default="auto")
    add_result_option(parser, "simulated_batches")
    arguments = parser.parse_args()
    pair = load_pair(arguments.model, dtype="float32")
    count = NUM_FITTED + arguments.requests
    loaded = encode_prompts(pair, list(NanoSource(0, count, 0).load(pair.chats)), ResponseLimits(arguments.new_tokens))
    dev, recording = (recording_of(pair, part, arguments) for part in (loaded[:NUM_FITTED], loaded[NUM_FITTED:]))
    rows: list[list[Value]] = []
    for size in arguments.sizes:
        rows += rows_of(size, pair, dev, recording, [ids for _, ids in loaded[NUM_FITTED:]], arguments)
        print(text_of(table_of(rows, arguments)), "\n", flush=True)
    used = [prompt.prompt_id for prompt, _ in loaded[NUM_FITTED:]]
    write_result(arguments.result, [table_of(rows, arguments)], split="dev", seeds=[0], prompts=prompt_record(used))


if __name__ == "__main__":
    with torch.no_grad():
        main()
