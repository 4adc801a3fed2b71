"""Where does the time of a round go? Steps timed by themselves, and rounds of the same decoders.

    python -m benchmarks.rounds --head FOLDER [--model mini] [--temperature 0.5] [--keep]

Settings decode the same prompts in turn, one after another. A round's overhead is what it takes
beyond its draft steps, with what the rule adds to them, and its verification. Medians of prompts.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from benchmarks.results import Column, Table, Value, add_keep_option, text_of, write_result
from specheads import Warp, load_head, load_pair
from specheads.decoding.decoder import Baseline, SpeculativeDecoder
from specheads.decoding.records import Generation
from specheads.decoding.step_times import StepTimes, TimedSteps, time_steps
from specheads.decoding.stopping import DraftProduct, FixedLength, HeadThreshold, OnlineLogistic
from specheads.decoding.stopping.rule import StoppingRule
from specheads.prompts.sources import NanoSource

ALONE = "target alone"
FIXED = "fixed_length(4)"
REPEATS = 300  # of each step
VERIFIED = tuple(range(1, 21))
PROMPTS = 24  # test prompts
TOKENS = 128
CONTEXT = 128  # positions
COLUMNS = [
    Column("setting"),
    Column("adds to a draft step", "percent:1"),
    Column("tokens/s", "fixed:0"),
    Column("tokens per round", "fixed"),
    Column("round", "ms:2"),
    Column("its draft steps", "ms:2"),
    Column("its verification", "ms:2"),
    Column("overhead", "ms:3"),
    Column("overhead of the round", "percent:1"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", required=True)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--temperature", type=float, default=0.5)
    add_keep_option(parser, "rounds")
    given = parser.parse_args()
    pair = load_pair(given.model, device="cpu")
    head = load_head(given.head)
    rules: dict[str, StoppingRule] = {
        "draft_product(0.5)": DraftProduct(0.5),
        "head_threshold(0.5)": HeadThreshold(head, 0.5),
        "online_logistic(0.7)": OnlineLogistic(),
    }
    warp = Warp(given.temperature, top_k=50)
    plain = SpeculativeDecoder(pair, stopping=FixedLength(4), warp=warp)
    taken = time_steps(plain, rules, CONTEXT, repeats=REPEATS, verified=VERIFIED)
    times = TimedSteps.of(taken, list(rules)).estimate
    decoders = {ALONE: Baseline(pair, warp, plain.target_engine), FIXED: plain}
    for name, rule in rules.items():
        decoders[name] = plain.with_stopping(rule)
    for decoder in decoders.values():
        decoder.warm_up()
    made: dict[str, list[Generation]] = defaultdict(list)
    for number, prompt in enumerate(NanoSource(0, 0, PROMPTS).load(pair.chats)):
        tokens = pair.encode_instruction(prompt.text)
        for name, decoder in decoders.items():
            made[name].append(decoder.generate(tokens, TOKENS, seed=number))
    rows = [row_of(name, generations, times) for name, generations in made.items()]
    costs = times.costs
    target, draft, first = (
        f"{1e3 * seconds:.3f} ms"
        for seconds in (costs.target_seconds, costs.draft_seconds, costs.round_seconds)
    )
    title = (
        f"{given.model} at a temperature of {given.temperature:g}: a step of the target takes"
        f" {target}, a draft step {draft}, the first of a round {first} more"
    )
    table = Table("rounds", title, COLUMNS, rows)
    print(f"{title}\n\n{text_of(table)}")
    write_result("rounds", [table], keep=given.keep)


def row_of(name: str, generations: Sequence[Generation], times: StepTimes) -> list[Value]:
    """Return a row of COLUMNS: medians over responses."""
    costs = times.costs
    columns: Mapping[str, list[float]] = defaultdict(list)
    for made in generations:
        rounds = made.rounds
        draft = 0.0
        verification = 0.0
        for each in rounds:
            if name != ALONE:
                draft += each.num_draft_calls * times.draft_seconds_of(name) + costs.round_seconds
            verification += costs.verification[each.num_drafted]
        whole = sum(each.seconds for each in rounds)
        columns["speed"].append(made.stats.tokens_per_second)
        columns["tokens"].append(made.stats.block_efficiency)
        columns["round"].append(whole / len(rounds))
        columns["draft"].append(draft / len(rounds))
        columns["verification"].append(verification / len(rounds))
        columns["overhead"].append((whole - draft - verification) / len(rounds))
    usual = {key: statistics.median(values) for key, values in columns.items()}
    added = times.share(name) if name in times.rules else None
    return [name, added, *usual.values(), usual["overhead"] / usual["round"]]


if __name__ == "__main__":
    main()
