"""What decoding costs, next to the goals for a GPU.

    python -m benchmarks.gpu [--device cuda] [--model NAME] [--context 256] [--tiny]

What does a step of the target read per second, what do a verification and a draft step cost, and
what of a round is neither? By default the pair has the shapes of Llama 3.1 8B and Llama 3.2 1B, and
random weights; the head is untrained, and prompts are random tokens. Rounds accept drafted tokens
at a given rate, whatever the models say, and no response ends early.

Each table is written when it is measured, so that a run that fails or is killed loses none. With
`--tiny` models take seconds, only to see that the script works.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.results import Column, Table, Value, add_keep_option, text_of, write_result
from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp, load_pair
from specheads.decoding.records import DecodeStats
from specheads.decoding.step_times import TimedSteps, bytes_of_step, now, time_steps
from specheads.decoding.stopping import FixedLength, HeadThreshold, StoppingRule
from specheads.decoding.verification import SyntheticVerification
from specheads.pair.pair import Pair
from specheads.pair.source import checked_device

ALONE = "target alone"
DRAFT = "draft step"
DRAFT_WITH_HEAD = "draft step with head"
WARPS = {"greedy": Warp(temperature=0.0), "sampled": Warp(top_k=50)}
VERIFIED = (2, 3, 4, 5, 6, 8, 9, 12, 16, 20)  # tokens that a verification reads
SPARE = 768  # positions of memory after the context
ACCEPTANCE = 0.8  # the rate of synthetic verification
LENGTHS = (4, 8)  # lengths of the drafts of timed rounds
VERIFICATION = "verification of 8"  # of the goal; its time stands for that of every round
GOALS = {  # by name what it says, whether the limit is the least or the most, and the limit
    "target_alone": (
        "the target alone, of the bandwidth of a large copy (8B, bfloat16)",
        "at least",
        0.80,
    ),
    "verification_of_8": (
        "a verification of 8 tokens, in steps of the target alone",
        "at most",
        1.05,
    ),
    "round": ("a round, in its steps alone", "at most", 1.15),
}


@dataclass(frozen=True)
class Machine:
    """Where it measures, and whether with models so small that it only shows that it works."""

    device: torch.device
    tiny: bool
    model: str  # a file of conf/model
    context: int  # positions in memory

    @property
    def engine(self) -> str:
        """The engine of decoding; compiling would take longer than a tiny model's measurement."""
        return "eager" if self.tiny else "auto"

    @property
    def repeats(self) -> int:
        """How often a step is timed."""
        return 2 if self.tiny else 20

    def pair(self) -> Pair:
        """Return the pair; synthetic ones have random weights, which are made on the device."""
        dtype = "float32" if self.device.type == "cpu" else "bfloat16"
        return load_pair(self.model, device=str(self.device), dtype=dtype)


@torch.no_grad()
def round_tables(setup: Machine, goals: dict[str, float]) -> Iterator[Table]:
    """Yield the tables of steps and rounds; put what was reached into `goals`."""
    pair = setup.pair()
    head = (
        AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size)).to(setup.device).requires_grad_(False)
    )
    context = setup.context
    of_memory = bandwidth(setup.device)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(pair.vocab_size, (context,), generator=generator).tolist()
    rows = list[list[Value]]()
    by_mode = dict[str, dict[str, float]]()
    for mode in WARPS:
        decoder = _decoder(setup, pair, HeadThreshold(head), mode)
        seconds = by_mode[mode] = seconds_of(
            decoder, context, setup.repeats, (8, 9) if setup.tiny else VERIFIED
        )
        for name, taken in seconds.items():
            read, _ = bytes_of_step(pair.draft_lm if name.startswith(DRAFT) else pair.target_lm)
            share = read / taken / of_memory
            rows.append([mode, name, taken, share, taken / seconds[ALONE]])
            if name == ALONE:
                goals["target_alone"] = share
        goals["verification_of_8"] = seconds[VERIFICATION] / seconds[ALONE]
    columns = [
        Column("decoding"),
        Column("step"),
        Column("time", "ms:3"),
        Column("weights read at, of the bandwidth", "percent"),
        Column("over the target alone", "ratio"),
    ]
    yield Table(
        "steps",
        f"Steps of {pair.name} at {context} positions of context, medians of {setup.repeats}",
        columns,
        rows,
    )
    rounds = [*_rounds(setup, pair, head, prompt, by_mode["sampled"])]
    goals["round"] = rounds[0][-1]
    columns = [
        Column("rule"),
        Column("a round", "ms:3"),
        Column("tokens per round", "fixed"),
        Column("over its steps", "ratio"),
    ]
    yield Table(
        "rounds", f"Rounds whose drafts are accepted at a rate of {ACCEPTANCE}", columns, rounds
    )


def _decoder(
    setup: Machine, pair: Pair, rule: StoppingRule, mode: str, **choices: object
) -> SpeculativeDecoder:
    window = 128 if setup.tiny else setup.context + SPARE
    return SpeculativeDecoder(
        pair, stopping=rule, warp=WARPS[mode], engine=setup.engine, window=window, **choices
    )


def _rounds(
    setup: Machine, pair: Pair, head: AcceptanceHead, prompt: list[int], steps: dict[str, float]
) -> Iterator[list[Value]]:
    """Yield the seconds of each rule's rounds, and those over the steps that they consist of, timed
    alone.
    """
    decoder = _decoder(
        setup,
        pair,
        FixedLength(max(LENGTHS)),
        "sampled",
        verification=SyntheticVerification(ACCEPTANCE),
    )
    rules: dict[str, StoppingRule] = {
        f"fixed K={length}": FixedLength(length) for length in LENGTHS
    }
    rules["head"] = HeadThreshold(head, 1.0, 1, LENGTHS[0])
    for name, rule in rules.items():
        each = decoder.with_stopping(rule)
        each.warm_up()
        for seed in (0, 1):  # the first is not timed
            stats = DecodeStats.of(
                each.generate(prompt, 16 if setup.tiny else 256, seed=seed).rounds
            )
        alone = stats.num_draft_calls * steps[DRAFT_WITH_HEAD if name == "head" else DRAFT]
        alone += stats.num_target_calls * steps[VERIFICATION]
        yield [
            name,
            stats.decode_seconds / stats.num_target_calls,
            stats.block_efficiency,
            stats.decode_seconds / alone,
        ]


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


def seconds_of(
    decoder: SpeculativeDecoder, context: int, repeats: int, verified: Sequence[int]
) -> dict[str, float]:
    """Return the seconds of the steps of a decoder that stops by a head, by name."""
    drafted = [count - 1 for count in verified]
    rules = {"head": decoder.stopping}
    taken = time_steps(decoder, rules, context, repeats=repeats, verified=drafted)
    times = TimedSteps.of(taken, list(rules)).estimate
    costs = times.costs
    seconds = {ALONE: costs.target_seconds}
    for count in drafted:
        seconds[f"verification of {count + 1}"] = costs.verification[count]
    seconds[DRAFT] = costs.draft_seconds
    seconds[DRAFT_WITH_HEAD] = times.draft_seconds_of("head")
    return seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write the tables with the goals."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--device", help="default: cuda if there is one")
    add("--model", default="synthetic-llama3", help="a file of conf/model (default: %(default)s)")
    add("--context", type=int, default=256, help="positions in memory (default: %(default)s)")
    add("--tiny", action="store_true", help="use models that take seconds")
    add_keep_option(parser, "gpu")
    given = parser.parse_args(argv)
    device = torch.device(checked_device(given.device))
    if given.tiny:
        setup = Machine(device, True, "synthetic-tiny", 32)
    else:
        setup = Machine(device, False, given.model, given.context)
    tables = list[Table]()
    reached = dict[str, float]()
    torch.manual_seed(0)
    for table in round_tables(setup, reached):
        print(f"\n{table.title}\n\n{text_of(table)}", flush=True)
        tables.append(table)
        note = f"{given.model}, with an untrained head."
        write_result("gpu", [_goals(reached), *tables], given.keep, notes=[note])
    print(f"\nThe goals\n\n{text_of(_goals(reached))}")


def _goals(reached: Mapping[str, float]) -> Table:
    """Return the goals with what was reached of them."""
    columns = [
        Column("goal"),
        Column("limit is"),
        Column("limit", "fixed:2"),
        Column("measured", "fixed:2"),
    ]
    return Table(
        "goals",
        "The goals, as ratios",
        columns,
        [[*goal, reached.get(name)] for name, goal in GOALS.items()],
    )


if __name__ == "__main__":
    main()
