"""Does anything grow or drift while one process works for long?

    python benchmarks/soak.py slopes [--minutes 20] [--engine auto]
    python benchmarks/soak.py outputs [--generations 10000]
    python benchmarks/soak.py heads [--heads 1000]

slopes: single and batched decoding, data generation and evaluation (replay) take turns on nano; resident memory, open files,
threads and seconds per token of every turn, and their slopes. Then the same turns by this process and by one that has just
started, in pairs: a machine that has become slower is so for both. outputs: the same prompts are decoded before, amid and after
very many others, single and batched, on every engine. heads: a bank of very many small heads is trained in one pass and exported.
"""

import argparse
import gc
import itertools
import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.process_usage import LARGEST_GROWTH, Clock, Slope, Usage, mean_ratio, slope
from benchmarks.results import Column, Table, Value, add_result_option, prompt_record, text_of, write_result
from data_gen.run import generate_data
from data_gen.settings import Generation
from specheads import AcceptanceHead, HeadConfig, Pair, SpeculativeDecoder, Warp, load_pair, stopping
from specheads.decoding.engine import obstacle_to_compiling
from specheads.evaluation.evaluate import evaluate
from specheads.evaluation.prompt_data import PromptData
from specheads.evaluation.settings import Evaluation, RecordingSettings
from specheads.heads.head_folder import FILES
from specheads.prompts.generated_data import GeneratedData
from specheads.prompts.nano_source import NanoSource
from specheads.training.heads.head_shape import HeadLoss, HeadShape
from specheads.training.heads.head_training import train_heads
from specheads.training.heads.settings import HeadTraining

MIB = 2**20
BATCH = 8
SHORT = 12  # tokens of a response that is one of very many

Turn = Callable[[int], tuple[int, int]]  # does what is due in the turn of a number; returns its generations and its tokens


def main(argv: Sequence[str] | None = None) -> list[Table]:
    """Measure what the command line asks for; print and keep the tables, and return them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--minutes", type=float, default=20.0, help="of the turns")
    parser.add_argument("--pairs", type=int, default=30, help="of turns of this process and of a new one, afterwards; 0: none")
    parser.add_argument("--engine", default="auto", help="of the turns; without it, outputs are of all engines")
    parser.add_argument("--size", type=int, default=8, help="prompts of a turn; a bank learns from 12 times as many")
    parser.add_argument("--generations", type=int, default=10_000, help="on each engine, single and batched")
    parser.add_argument("--checked", type=int, default=100, help="prompts that are decoded again and again")
    parser.add_argument("--heads", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=2, help="that the heads are trained for")
    add_result_option(parser, "")
    given = parser.parse_args(argv)
    silence()
    pair = load_pair("nano", device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        tables, prompts = PARTS[given.part](pair, given, Path(folder))
    print("\n\n".join(f"{table.title}\n\n{text_of(table)}" for table in tables))
    name = given.result or f"soak_{given.part}"
    write_result(name, tables, split="train", seeds=[0], prompts=prompt_record(prompts))
    return tables


def silence() -> None:
    """Drop what libraries say of runs as small as these."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


# --- slopes


@dataclass(frozen=True)
class Sample:
    """What was measured in a turn, at its end."""

    seconds: float  # since the start
    generations: int  # since the start
    usage: Usage
    speeds: dict[str, float]  # seconds per token of each part


def slopes(pair: Pair, given: argparse.Namespace, folder: Path) -> tuple[list[Table], list[str]]:
    """Take turns for some minutes; return the tables of slopes, of counts, and of this process next to a new one."""
    turns, prompts = turns_of(pair, given.engine, given.size, folder)
    for turn in turns.values():
        turn(0)  # compiles and loads
    clock, samples = Clock(), []
    done = dict.fromkeys(turns, 0)
    for number in itertools.count(1):
        speeds, generations = take_turns(turns, number)
        done = {name: done[name] + generations[name] for name in turns}
        gc.collect()  # Python itself looks for cycles among old objects only after a quarter more were made
        samples.append(Sample(clock(), sum(done.values()), Usage.now(), speeds))
        if clock() >= 60 * given.minutes and len(samples) >= 3:
            break
    tables = [slope_table(samples), counts_table(done, samples)]
    if given.pairs:
        tables.append(age_table(*in_pairs(turns, given, folder), samples[-1].seconds / 60))
    return tables, prompts


def take_turns(turns: dict[str, Turn], number: int) -> tuple[dict[str, float], dict[str, int]]:
    """Do everything once; return seconds per token and generations by name."""
    speeds, done = {}, {}
    for name, turn in turns.items():
        start = time.perf_counter()
        done[name], tokens = turn(number)
        speeds[name] = (time.perf_counter() - start) / tokens
    return speeds, done


# The turns of a process that was started to take them.
_turns: dict[str, Turn] = {}


def start_afresh(engine: str, size: int, folder: Path) -> None:
    """Prepare this process to take turns."""
    silence()
    _turns.update(turns_of(load_pair("nano", device="cpu"), engine, size, folder)[0])
    for turn in _turns.values():
        turn(0)


def turn_of_its_own(number: int) -> dict[str, float]:
    """Return seconds per token of a turn of the process that was started for it."""
    return take_turns(_turns, number)[0]


def in_pairs(turns: dict[str, Turn], given: argparse.Namespace, folder: Path) -> tuple[list[dict[str, float]], ...]:
    """Return seconds per token of turns that this process takes and that a new one takes, one after the other in both orders."""
    started = (given.engine, given.size, folder / "fresh")
    aged, fresh = [], []
    with ProcessPoolExecutor(1, get_context("spawn"), start_afresh, started) as process:
        process.submit(turn_of_its_own, 0).result()
        for number in range(1, given.pairs + 1):
            for is_aged in (True, False) if number % 2 else (False, True):
                if is_aged:
                    aged.append(take_turns(turns, number)[0])
                else:
                    fresh.append(process.submit(turn_of_its_own, number).result())
    return aged, fresh


def age_table(aged: Sequence[dict[str, float]], fresh: Sequence[dict[str, float]], minutes: float) -> Table:
    """Return how much longer a token takes in a process that has worked for so long than in a new one."""
    rows: list[list[Value]] = []
    for name in aged[0]:
        pairs = [(1e6 * ours[name], 1e6 * theirs[name]) for ours, theirs in zip(aged, fresh, strict=True)]
        ratio = mean_ratio(pairs)
        slower = True if ratio["low"] > 1 else False if ratio["high"] <= 1 + LARGEST_GROWTH else None
        medians = [statistics.median(times) for times in zip(*pairs, strict=True)]
        rows.append([name, *medians, ratio, {True: "YES", False: "no", None: "too noisy to say"}[slower]])
    columns = [Column("what"), Column("this process, µs per token", "fixed:0"), Column("a new one, µs per token", "fixed:0")]
    columns += [Column("ratio", "fixed:3"), Column("slower")]
    title = f"Turns after {minutes:.1f} minutes of work, and of a new process: {len(aged)} pairs, mean ratios with 95 % intervals"
    return Table("ages", title, columns, rows)


def turns_of(pair: Pair, engine: str, size: int, folder: Path) -> tuple[dict[str, Turn], list[str]]:
    """Return what is done in a turn by name, and the ids of its prompts."""
    chosen = list(NanoSource(4 * size, size, size).load(pair.chats))
    prompts = [pair.encode_instruction(prompt.text) for prompt in chosen if prompt.split == "train"]
    head = random_head(pair)
    warp = Warp(top_k=50)
    decoder = SpeculativeDecoder(pair, stopping=stopping.HeadThreshold(head, 0.7), warp=warp, engine=engine)

    def single(number: int) -> tuple[int, int]:
        some = [prompts[(size * number + index) % len(prompts)] for index in range(size)]
        return size, sum(len(decoder.generate(prompt, 32, seed=number).tokens) for prompt in some)

    def batched(number: int) -> tuple[int, int]:
        done = list(decoder.generate_batch(prompts, BATCH, 32, seeds=[number] * len(prompts)))
        return len(done), sum(len(generation.tokens) for _, generation in done)

    def data(number: int) -> tuple[int, int]:
        made = Generation(max_new_tokens=16, rows_per_shard=16, samples_per_position=2, seed=number, warp=warp)
        generate_data(pair, NanoSource(2 * size, 0, 0), made, folder / "data")
        shutil.rmtree(folder / "data")
        return 2 * size, 2 * size * 16

    def replay(number: int) -> tuple[int, int]:
        recorded = RecordingSettings(num_samples=2)
        values: dict[str, Any] = {"num_prompts": size, "num_dev_prompts": size, "max_new_tokens": 16, "live": "none"}
        settings = Evaluation(**values, fixed_lengths=(2, 4), thresholds=(0.4, 0.7), record=recorded, seed=number)
        evaluate(pair, {"random": head}, settings, PromptData(NanoSource(0, size, size)), (folder / "recorded", folder / "run"))
        shutil.rmtree(folder / "recorded")
        return 2 * size, 2 * size * 16

    turns = {"single": single, "batched": batched, "data": data, "evaluation": replay}
    return turns, [prompt.prompt_id for prompt in chosen]


def random_head(pair: Pair) -> AcceptanceHead:
    """Return an untrained head whose predictions vary."""
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size, depth=1))
    torch.nn.init.normal_(head.readout.weight, std=0.2)
    torch.nn.init.constant_(head.readout.bias, 1.5)
    return head.requires_grad_(False).eval()


def slope_table(samples: Sequence[Sample]) -> Table:
    """Return the slopes of everything that was sampled, per hour and per 1,000 generations."""
    series: dict[str, list[float]] = {
        "resident memory, MiB": [sample.usage.resident / MIB for sample in samples],
        "C heap in use, MiB": [sample.usage.heap / MIB for sample in samples],
        "Python's blocks in use": [float(sample.usage.blocks) for sample in samples],
        "open files": [float(sample.usage.files) for sample in samples],
        "threads": [float(sample.usage.threads) for sample in samples],
    }
    for name in samples[0].speeds:
        series[f"{name}, µs per token"] = [1e6 * sample.speeds[name] for sample in samples]
    rows: list[list[Value]] = []
    for name, values in series.items():
        by_time = slope([sample.seconds for sample in samples], values)
        by_count = slope([float(sample.generations) for sample in samples], values)
        rows.append([name, by_time.mean, by_time.per(3600), by_count.per(1000), by_time.growth, verdict_of(by_time)])
    columns = [Column("what"), Column("mean", "fixed:1"), Column("slope per hour", "fixed:2")]
    columns += [Column("slope per 1,000 generations", "fixed:3"), Column("growth in all", "signed_percent:2"), Column("flat")]
    title = f"Least-squares slopes over {samples[-1].seconds / 60:.1f} minutes, with 95 % intervals"
    return Table("slopes", title, columns, rows)


def verdict_of(line: Slope) -> str:
    """Return whether a line is flat as a word."""
    return {True: "yes", False: "NO", None: "too noisy to say"}[line.is_flat]


def counts_table(done: dict[str, int], samples: Sequence[Sample]) -> Table:
    """Return how many generations were made of each kind."""
    rows: list[list[Value]] = [[name, count] for name, count in done.items()]
    return Table("counts", f"Generations in {len(samples):,} turns", [Column("what"), Column("generations", "fixed:0")], rows)


# --- outputs


def outputs(pair: Pair, given: argparse.Namespace, folder: Path) -> tuple[list[Table], list[str]]:
    """Decode very many prompts on every engine; return the table of what had changed."""
    chosen = list(NanoSource(2000, 0, 0).load(pair.chats))
    prompts = [pair.encode_instruction(prompt.text) for prompt in chosen]
    rows: list[list[Value]] = []
    engines = {"eager": "eager", "static memory": "cuda_graph", "compiled": "compiled"}  # on a CPU cuda_graph captures nothing
    if obstacle_to_compiling(pair.target_lm):
        del engines["compiled"]
    if given.engine != "auto":
        engines = {given.engine: given.engine}
    for name, engine in engines.items():
        decoder = SpeculativeDecoder(pair, stopping=stopping.HeadThreshold(random_head(pair), 0.7), engine=engine)
        ways: dict[str, Callable[..., list[list[int]]]] = {"single": single_tokens, "batched": batched_tokens}
        for way, tokens_of in ways.items():
            rows.append([name, way, *drift(partial(tokens_of, decoder), prompts, given)])
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)  # each takes minutes
    columns = [Column("engine"), Column("decoding"), Column("generations", "fixed:0")]
    columns += [Column("checked prompts that differ amid", "fixed:0"), Column("after", "fixed:0")]
    columns += [Column("first half, µs per token", "fixed:0"), Column("second half, µs per token", "fixed:0")]
    columns += [Column("memory gained in the second half, MiB", "fixed:1")]
    title = f"{given.checked} prompts decoded before, amid and after {given.generations:,} others, sampled"
    return [Table("outputs", title, columns, rows)], [prompt.prompt_id for prompt in chosen]


def single_tokens(decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
    """Return the tokens of prompts that are decoded one after another."""
    return [decoder.generate(prompt, SHORT, seed).tokens.tolist() for prompt, seed in zip(prompts, seeds, strict=True)]


def batched_tokens(decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
    """Return the tokens of prompts that are decoded together."""
    done = dict(decoder.generate_batch(prompts, BATCH, SHORT, seeds))
    return [done[number].tokens.tolist() for number in range(len(prompts))]


def drift(
    tokens_of: Callable[[Sequence[Sequence[int]], Sequence[int]], list[list[int]]],
    prompts: Sequence[Sequence[int]],
    given: argparse.Namespace,
) -> list[Value]:
    """Return the generations, the checked prompts that differ amid and after, seconds per token and the growth of memory."""
    checked, seeds = prompts[: given.checked], list(range(given.checked))
    before = tokens_of(checked, seeds)
    differing, speeds, resident = [], [], []
    for half in range(2):
        count, start, tokens = given.generations // 2, time.perf_counter(), 0
        for chunk in chunks(range(half * count, (half + 1) * count)):
            tokens += sum(map(len, tokens_of([prompts[number % len(prompts)] for number in chunk], chunk)))
        speeds.append((time.perf_counter() - start) / tokens)
        differing.append(sum(first != again for first, again in zip(before, tokens_of(checked, seeds), strict=True)))
        gc.collect()  # as `slopes` does before it samples
        resident.append(Usage.now().resident / MIB)
    return [given.generations, *differing, *(1e6 * seconds for seconds in speeds), resident[1] - resident[0]]


def chunks(numbers: range) -> Iterator[range]:
    """Yield a range in parts of at most 250 numbers."""
    yield from (numbers[first : first + 250] for first in range(0, len(numbers), 250))


# --- heads


def heads(pair: Pair, given: argparse.Namespace, folder: Path) -> tuple[list[Table], list[str]]:
    """Train and export a bank of very many heads; return the table of what it took."""
    source = NanoSource(12 * given.size, 3 * given.size, 3 * given.size)
    made = Generation(max_new_tokens=32, samples_per_position=2, warp=Warp(top_k=50))
    rows: list[list[Value]] = []
    cache = generate_data(pair, source, made, folder / "data")
    data = GeneratedData(cache, list(source.load(pair.chats)), made.limits)
    for number in sorted({1, given.heads}):
        settings = HeadTraining(
            **grid(number), trainer={"max_epochs": given.epochs}, calibration={"num_prompts": given.size}, warp=made.warp
        )
        start, before = time.perf_counter(), Usage.now().resident
        trained = train_heads(pair, data, settings, folder / f"run-{number}")
        exported = [path.parent for path in (folder / f"run-{number}").glob("heads/*/config.json")]
        size = sum(path.stat().st_size for path in (folder / f"run-{number}" / "heads").rglob("*") if path.is_file())
        complete = sum(all((path / name).is_file() for name in FILES) for path in exported)
        longest = max(len(path.name) for path in exported)
        taken = time.perf_counter() - start
        rows.append([trained.num_heads, complete, taken, (Usage.now().resident - before) / MIB, size / MIB, longest])
    columns = [Column("heads", "fixed:0"), Column("exported", "fixed:0"), Column("seconds", "fixed:1")]
    columns += [Column("resident memory gained, MiB", "fixed:0"), Column("exported, MiB", "fixed:1")]
    columns += [Column("longest name, characters", "fixed:0")]
    title = f"Small heads of one bank, {given.epochs} epochs over {12 * given.size} responses of nano, calibrated and exported"
    return [Table("heads", title, columns, rows)], [prompt.prompt_id for prompt in data.prompts]


def grid(number: int) -> dict[str, Any]:
    """Return the settings of so many different small heads: 1, or a multiple of 10."""
    weights = tuple(1 + index / 4 for index in range(max(1, number // 10)))
    widths, depths = ((4, 8, 12, 16, 24), (0, 1)) if number > 1 else ((8,), (1,))
    return {"head": HeadShape(depth=depths, width=widths), "loss": HeadLoss(reject_weight=weights)}


PARTS = {"slopes": slopes, "outputs": outputs, "heads": heads}


if __name__ == "__main__":
    main()
