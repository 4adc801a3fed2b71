"""What does a verification cost next to one step of the target alone, and a draft step with a head next to one without?

    python benchmarks/steps.py [--models nano synthetic-21m synthetic-300m] [--types float32 bfloat16] [--repeats 40]

Times the compiled steps of which decoding consists, forward pass and all that follows it, at a context of 256 positions. Weights
come from where a decoder's do: in each repeat the target's steps run in random order after one that is not timed, and each kind
of draft step several times in a row after a verification, as in a round; of these the mean counts. Prints medians, ratios, and
the share of a large copy's bandwidth at which a step reads its weights.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_keep_option, text_of, write_result
from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp, load_pair
from specheads.decoding.baseline import Baseline
from specheads.decoding.drafting.autoregressive import ChainState
from specheads.decoding.engine import Engine, compile_ahead
from specheads.decoding.stopping import FixedLength, HeadThreshold, StoppingRule
from specheads.language_model import LanguageModel
from specheads.pair import Pair

WARPS = {"greedy": Warp(temperature=0.0), "sampled": Warp(top_k=50)}
VERIFIED = (3, 5, 9)  # tokens that a verification reads: the drafted ones and the last committed one
ALONE, DRAFT, DRAFT_WITH_HEAD = "target alone", "draft step", "draft step with head"
IN_A_ROW = 4  # draft steps between two verifications

Step = Callable[[], object]


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes."""
    source = torch.ones(2**26, device=device)
    copied = torch.empty_like(source)
    taken = []
    for _ in range(20):
        start = now(device)
        copied.copy_(source)
        taken.append(now(device) - start)
    return 2 * source.nbytes / statistics.median(taken)


def now(device: torch.device) -> float:
    """Return the time once the device has finished its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bytes_read(lm: LanguageModel, engine: Engine, context: int) -> int:
    """Return the bytes of weights and of KV memory that a forward pass over one token needs at `context` positions."""
    table = lm.model.get_input_embeddings().weight
    tied = table is lm.output_embedding.weight
    weights = sum(weight.nbytes for weight in lm.model.parameters()) - (0 if tied else table.nbytes)
    return weights + sum(kv[:, :, :context].nbytes for layer in engine._layers for kv in (layer.keys, layer.values))


def target_alone(decoder: SpeculativeDecoder) -> Baseline:
    """Return the decoding of the target alone on a decoder's engine."""
    return Baseline(decoder.pair, decoder.warp, decoder.target_engine)


def draft_steps(decoder: SpeculativeDecoder, rules: Mapping[str, StoppingRule], context: int) -> dict[str, tuple[Step, int]]:
    """Return a step of the target alone and a draft step with each rule, by name, and the bytes that each must read."""
    device, target = decoder.pair.target_lm.device, target_alone(decoder)
    decoders = {name: decoder.with_stopping(rule) for name, rule in rules.items()}
    makers = [each.prepare for each in (decoder, *decoders.values(), target)]
    compile_ahead(makers)
    for prepare in makers:
        prepare()
    uniform = torch.zeros(1, dtype=torch.float64, device=device)
    ends = torch.zeros(decoder.pair.vocab_size, dtype=torch.bool, device=device)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)

    def alone() -> None:
        _place(decoder.target_engine, context)
        target._compiled_step(token, uniform)

    def draft(each: SpeculativeDecoder) -> Step:
        state = ChainState(torch.zeros(1, dtype=torch.bool, device=device), each.stopping.start_prompt(1, device))

        def step() -> None:
            _place(each.draft_engine, context)
            each._drafter._step(token, decoder._memory.indices[0], uniform, ends, state)

        return step

    of_target, of_draft = (bytes_read(each.lm, each, context) for each in (decoder.target_engine, decoder.draft_engine))
    return {ALONE: (alone, of_target)} | {name: (draft(each), of_draft) for name, each in decoders.items()}


def steps_of(decoder: SpeculativeDecoder, context: int, verified: Sequence[int] = VERIFIED) -> dict[str, tuple[Step, int]]:
    """Return the steps of a decoder that has a head by name, and the bytes that each must read."""
    drafts = draft_steps(decoder, {DRAFT: FixedLength(8), DRAFT_WITH_HEAD: decoder.stopping}, context)
    verifier, uniforms = decoder._verifier, torch.zeros(2, dtype=torch.float64, device=decoder.pair.target_lm.device)
    verifier._memory.probs.fill_(1 / decoder.pair.vocab_size)

    def verify(count: int) -> Step:
        inputs = (uniforms, verifier._lengths.tensor, verifier.start_prompt())
        tokens = verifier._memory.start(decoder.target_engine.padded(count))

        def step() -> None:
            _place(decoder.target_engine, context)
            verifier._compiled_step(tokens, *inputs)

        return step

    alone = drafts.pop(ALONE)
    return {ALONE: alone} | {f"verification of {count}": (verify(count), alone[1]) for count in verified} | drafts


def _place(engine: Engine, length: int) -> None:
    """Pretend that `length` positions are in memory."""
    for layer in engine._layers:
        layer.length = length


def seconds_of(steps: Mapping[str, tuple[Step, int]], device: torch.device, repeats: int) -> dict[str, float]:
    """Return the median seconds of each step."""
    drafts = [name for name in steps if name.startswith(DRAFT)]
    others = [name for name in steps if name not in drafts]
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        steps[others[0]][0]()
        for name in [*random.sample(others, len(others)), *random.sample(drafts, len(drafts))]:
            count = IN_A_ROW if name in drafts else 1
            if name in drafts:
                steps[others[-1]][0]()
            start = now(device)
            for _ in range(count):
                steps[name][0]()
            taken[name].append((now(device) - start) / count)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def measure(pair: Pair, dtype: str, engine: str, context: int, repeats: int) -> tuple[list[list[Value]], list[list[Value]]]:
    """Return the rows of both tables for one pair in one type."""
    device, times, ratios = pair.target_lm.device, [], []
    limit = bandwidth(device)
    head = AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size)).to(device).requires_grad_(False)
    for mode, warp in WARPS.items():
        steps = steps_of(SpeculativeDecoder(pair, stopping=HeadThreshold(head), warp=warp, engine=engine), context)
        seconds = seconds_of(steps, device, repeats)
        rows = [[pair.name, dtype, mode, name, taken, steps[name][1] / taken / limit] for name, taken in seconds.items()]
        over = [seconds[f"verification of {count}"] / seconds[ALONE] for count in VERIFIED]
        times += rows
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
    arguments = parser.parse_args()
    random.seed(0)
    times, ratios = [], []
    for model in arguments.models:
        for dtype in arguments.types:
            pair = load_pair(model, dtype=dtype)
            of_pair = measure(pair, dtype, arguments.engine, arguments.context, arguments.repeats)
            times += of_pair[0]
            ratios += of_pair[1]
            print(text_of(ratio_table(of_pair[1], arguments)), "\n", flush=True)
    tables = [ratio_table(ratios, arguments), time_table(times, arguments)]
    for table in tables:
        print(f"{table.title}\n\n{text_of(table)}\n")
    write_result("steps", tables, seeds=[0], notes="Synthetic models have random weights.", keep=arguments.keep)


def ratio_table(rows: Sequence[Sequence[Value]], arguments: argparse.Namespace) -> Table:
    heads = [Column(name) for name in ("model", "type", "mode")]
    over = [Column(f"{count} tokens", "ratio:2") for count in VERIFIED]
    title = f"Time over a step of the target alone, median of {arguments.repeats}, {arguments.context} positions of context"
    return Table("ratios", title, [*heads, *over, Column("draft step with head over one without", "ratio:2")], rows)


def time_table(rows: Sequence[Sequence[Value]], arguments: argparse.Namespace) -> Table:
    columns = [*(Column(name) for name in ("model", "type", "mode", "step")), Column("time", "ms:3")]
    columns.append(Column("read at, of a large copy's bandwidth", "percent:0"))
    return Table("times", f"The steps, median of {arguments.repeats}", columns, rows)


if __name__ == "__main__":
    with torch.no_grad():
        main()
