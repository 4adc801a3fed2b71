"""What does a verification cost next to one step of the target alone, and a draft step with a head next to one without?

    python benchmarks/steps.py [--models nano synthetic-21m synthetic-300m] [--types float32 bfloat16] [--repeats 40]

Times the steps of which decoding consists, forward pass and all that follows it, at a context of 256 positions, with the measurer
of specheads/decoding/step_times.py. Prints medians, ratios, and the share of a large copy's bandwidth at which a step reads the
weights.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_keep_option, text_of, write_result
from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp, load_pair
from specheads.decoding.decoder import Baseline
from specheads.decoding.step_times import step_times
from specheads.decoding.stopping import HeadThreshold
from specheads.pair.language_model import LanguageModel
from specheads.pair.pair import Pair

WARPS = {"greedy": Warp(temperature=0.0), "sampled": Warp(top_k=50)}
VERIFIED = (3, 5, 9)  # tokens that a verification reads: the drafted ones and the last committed one
ALONE, DRAFT, DRAFT_WITH_HEAD = "target alone", "draft step", "draft step with head"


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.ones(2**26, device=device)
    copied = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: copied.copy_(source), device, 20)


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of a call, after two that are not timed."""
    taken = []
    for _ in range(2 + repeats):
        start = now(device)
        run()
        taken.append(now(device) - start)
    return statistics.median(taken[2:])


def now(device: torch.device) -> float:
    """Return the time once the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def target_alone(decoder: SpeculativeDecoder) -> Baseline:
    """Return the decoding of the target alone on a decoder's engine."""
    return Baseline(decoder.pair, decoder.warp, decoder.target_engine)


def weight_bytes(lm: LanguageModel) -> int:
    """Return the bytes of weights that a forward pass over one token reads."""
    table = lm.model.get_input_embeddings().weight
    tied = table is lm.output_embedding.weight
    return sum(weight.nbytes for weight in lm.model.parameters()) - (0 if tied else table.nbytes)


def seconds_of(decoder: SpeculativeDecoder, context: int, repeats: int, verified: Sequence[int] = VERIFIED) -> dict[str, float]:
    """Return the median seconds of the steps of a decoder that stops by a head, by name."""
    drafted = [count - 1 for count in verified if count > 1]
    times = step_times(decoder, {"head": decoder.stopping}, context, repeats, drafted)
    costs = times.costs
    verifications = {f"verification of {count + 1}": costs.verification[count] for count in drafted}
    drafts = {DRAFT: costs.draft_seconds, DRAFT_WITH_HEAD: costs.draft_seconds + times.rules["head"].step_seconds}
    return {ALONE: costs.target_seconds} | verifications | drafts


def _rows_of(pair: Pair, dtype: str, engine: str, context: int, repeats: int) -> tuple[list[list[Value]], list[list[Value]]]:
    """Return the rows of both tables for one pair in one type."""
    device, times, ratios = pair.target_lm.device, list[list[Value]](), list[list[Value]]()
    limit = bandwidth(device)
    head = AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size)).to(device).requires_grad_(False)
    for mode, warp in WARPS.items():
        decoder = SpeculativeDecoder(pair, stopping=HeadThreshold(head), warp=warp, engine=engine)
        seconds = seconds_of(decoder, context, repeats)
        for name, taken in seconds.items():
            read = weight_bytes(pair.draft_lm if name.startswith(DRAFT) else pair.target_lm)
            times.append([pair.name, dtype, mode, name, taken, read / taken / limit])
        over = [seconds[f"verification of {count}"] / seconds[ALONE] for count in VERIFIED]
        ratios.append([pair.name, dtype, mode, *over, seconds[DRAFT_WITH_HEAD] / seconds[DRAFT]])
    return times, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["nano", "synthetic-21m", "synthetic-300m"], metavar="NAME")
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"], metavar="TYPE")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--context", type=int, default=256, help="positions in memory")
    parser.add_argument("--repeats", type=int, default=40)
    add_keep_option(parser, "steps")
    given = parser.parse_args()
    times, ratios = [], []
    for model in given.models:
        for dtype in given.types:
            of_pair = _rows_of(load_pair(model, dtype=dtype), dtype, given.engine, given.context, given.repeats)
            times += of_pair[0]
            ratios += of_pair[1]
    heads, over = [Column(name) for name in ("model", "type", "mode")], [Column(f"{count} tokens", "ratio") for count in VERIFIED]
    title = f"Time over a step of the target alone, median of {given.repeats}, {given.context} positions of context"
    tables = [Table("ratios", title, [*heads, *over, Column("draft step with head over one without", "ratio")], ratios)]
    columns = [*heads, Column("step"), Column("time", "ms:3"), Column("weights read at, of a large copy's bandwidth", "percent")]
    tables.append(Table("times", f"The steps, median of {given.repeats}", columns, times))
    for table in tables:
        print(f"{table.title}\n\n{text_of(table)}\n")
    write_result("steps", tables, seeds=[0], notes="Synthetic models have random weights.", keep=given.keep)


if __name__ == "__main__":
    main()
