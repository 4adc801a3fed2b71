"""What energy does a token take, by the size of the model, the size of the batch, and with drafts over the target alone?

    python benchmarks/energy.py [--models nano mini synthetic-21m synthetic-300m] [--drafting nano mini] [--sizes 1 2 4 8 16]
        [--lengths 2 4] [--new-tokens 64] [--requests 32] [--repeats 3] [--device cuda --dtype bfloat16]

First every model of the pairs `--models`, drafts too, decodes alone short prompts of random tokens. A verification of several
tokens is such a batch: its tokens share the reading of the weights. Then the pairs `--drafting`, which are trained, decode
prompts with drafts of fixed lengths, in turn with the target alone.
No token ends a response, so that all rows of a batch stay full. Energy is that of whole runs, with the reading of prompts, by
NVML's or RAPL's counter; where neither can be read, the tables hold the seconds only and say what is needed.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu.build_pairs import made_up_prompts
from benchmarks.results import Column, Table, Value, add_result_option, prompt_record, text_of, write_result
from specheads import Warp, load_pair
from specheads.decoding.stopping import FixedLength
from specheads.evaluation.energy.metering import Metering, metering_of
from specheads.evaluation.energy.per_token import batch_energy
from specheads.evaluation.report import BatchEnergy
from specheads.evaluation.serving.batch_sweep import ALONE, BatchRun, BatchSetting, BatchSweep
from specheads.pair import Pair
from specheads.prompts.encoding import EncodedPrompt, ResponseLimits, encode_prompts
from specheads.prompts.nano_source import NanoSource

PROMPT_TOKENS = 16  # of random ones
WINDOW = 512  # positions of each row's memory
WARP = Warp(top_k=50)
MEASURED = (Column("J/token", "fixed:4"), Column("above idle", "fixed:4"), Column("J/token over the smallest batch", "ratio:2"))
DRAFTED = (Column("J/token", "fixed:4"), Column("above idle", "fixed:4"), Column("J/token over target alone", "ratio:2"))
UNCERTAIN = Column("uncertain by, from the counter", "percent:1")


def models_of(pair: Pair) -> dict[str, Pair]:
    """Return both models by their ids, each as the target of a pair, the draft first."""
    draft = replace(pair, target=pair.draft, target_id=pair.draft_id, target_revision=pair.draft_revision)
    return {pair.draft_id: draft, pair.target_id: pair}


def sweep_of(pair: Pair, size: int, metering: Metering, arguments: argparse.Namespace) -> BatchSweep:
    """Return how batches of one size are decoded."""
    window = min(WINDOW, pair.window)
    choices = {"engine": arguments.engine, "stop_tokens": (), "window": window, "meter": metering.meter}
    return BatchSweep(pair, WARP, arguments.new_tokens, size, arguments.repeats, **choices)


def seconds_per_token(runs: Sequence[BatchRun]) -> float:
    """Return the seconds of whole runs over their tokens."""
    return sum(run.seconds for run in runs) / sum(run.total.num_tokens for run in runs)


def energy_cells(energy: BatchEnergy | None) -> list[Value]:
    """Return joules per token, those above idle, the ratio, and how uncertain the counter leaves them; nothing if unmeasured."""
    if energy is None:
        return []
    return [energy.joules_per_token, energy.above_idle, energy.over_alone, energy.resolution_error]


def model_rows(name: str, pair: Pair, metering: Metering, arguments: argparse.Namespace) -> Iterator[list[Value]]:
    """Yield a row for each size of the batch that a model decodes alone."""
    prompts = made_up_prompts(pair, arguments.requests, PROMPT_TOKENS)
    parameters = sum(weight.numel() for weight in pair.target.parameters()) / 1e6
    smallest: list[BatchRun] = []
    for size in sorted(arguments.sizes):
        (runs,) = sweep_of(pair, size, metering, arguments).run([ALONE], prompts)
        smallest = smallest or runs
        energy = None if metering.idle is None else batch_energy(runs, smallest, metering.idle)
        yield [name, parameters, size, seconds_per_token(runs), *energy_cells(energy)]


def drafting_rows(pair: Pair, prompts: Sequence[EncodedPrompt], metering: Metering, arguments: argparse.Namespace) -> Iterator:
    """Yield a row for each size of the batch, for the target alone and each length of the drafts."""
    drafting = [BatchSetting(f"fixed K={length}", "fixed_length", FixedLength(length)) for length in arguments.lengths]
    ids = [prompt for _, prompt in prompts]
    for size in arguments.sizes:
        runs = sweep_of(pair, size, metering, arguments).run([ALONE, *drafting], ids)
        for setting, made in zip([ALONE, *drafting], runs, strict=True):
            energy = None if metering.idle is None else batch_energy(made, runs[0], metering.idle)
            speedup = seconds_per_token(runs[0]) / seconds_per_token(made)
            yield [pair.name, size, setting.name, seconds_per_token(made), speedup, *energy_cells(energy)]


def tables_of(models: Sequence[Sequence[Value]], drafting: Sequence[Sequence[Value]], measurable: bool) -> list[Table]:
    """Return both tables; without energy, of the seconds only."""
    columns = [Column("model"), Column("million weights", "fixed:1"), Column("rows"), Column("time per token", "ms:3")]
    drafts = [*(Column(name) for name in ("pair", "rows", "setting")), Column("time per token", "ms:3")]
    drafts.append(Column("speed over target alone", "ratio:2"))
    what = "Time and energy" if measurable else "Time (energy is not measurable here)"
    return [
        Table("models", f"{what} of a token, by model and batch", [*columns, *((*MEASURED, UNCERTAIN) * measurable)], models),
        Table("drafting", f"{what} of a token, with drafts", [*drafts, *((*DRAFTED, UNCERTAIN) * measurable)], drafting),
    ]


def note_of(metering: Metering) -> str:
    """Return how energy was measured, or what it would need."""
    if metering.idle is None:
        return f"Energy is not measurable here: {metering.reason}"
    idle, counters = metering.idle, metering.context()["counters"]
    note = f"By {', '.join(counters)}; the idle machine takes {idle.watts:.3g} W, measured for {idle.seconds:g} s; the counter "
    return f"{note}moves every {1e3 * idle.update_seconds:.3g} ms."


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["nano", "mini", "synthetic-21m", "synthetic-300m"], metavar="NAME")
    parser.add_argument("--drafting", nargs="*", default=["nano", "mini"], metavar="NAME", help="pairs that decode with drafts")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="rows of a batch")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2, 4], help="tokens of a draft")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=32, help="of a run; a multiple of the sizes keeps all rows full")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", help="default: cuda if there is one")
    add_result_option(parser, "energy")
    arguments = parser.parse_args(argv)
    models: list[list[Value]] = []
    drafting: list[list[Value]] = []
    metering, used = None, []
    for name in dict.fromkeys([*arguments.models, *arguments.drafting]):
        pair = load_pair(name, device=arguments.device, dtype=arguments.dtype)
        metering = metering or metering_of(pair)
        if name in arguments.models:
            for model, alone in models_of(pair).items():
                models += model_rows(model, alone, metering, arguments)
        if name in arguments.drafting:
            source = NanoSource(0, arguments.requests, 0).load(pair.chats)
            prompts = encode_prompts(pair, list(source), ResponseLimits(arguments.new_tokens))
            used += [prompt.prompt_id for prompt, _ in prompts]
            drafting += drafting_rows(pair, prompts, metering, arguments)
    assert metering is not None
    tables, note = tables_of(models, drafting, metering.meter is not None), note_of(metering)
    for table in tables:
        print(f"{table.title}\n\n{text_of(table)}\n")
    print(note)
    prompts = prompt_record(dict.fromkeys(used)) if used else None
    write_result(arguments.result, tables, split="dev", seeds=[0], prompts=prompts, notes=[note])


if __name__ == "__main__":
    with torch.no_grad():
        main()
