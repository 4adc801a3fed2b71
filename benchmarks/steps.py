"""What does a verification cost next to one step of the target alone, and a draft step with a head next to one without?

    python benchmarks/steps.py [--models nano synthetic-21m synthetic-300m] [--types float32 bfloat16] [--repeats 40]
    python benchmarks/steps.py --models mini --types float32 --rules --repeats 400

Times the steps of which decoding consists, forward pass and all that follows it, at a context of 256 positions, with the measurer
of specheads/decoding/step_times.py. Prints medians, ratios, and the share of a large copy's bandwidth at which a step reads the
weights. With `--rules` it times draft steps with rules that never stop instead: a fixed length, rules on the draft's confidence,
and heads of random weights, by their shape and inputs.
"""

import argparse
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_keep_option, text_of, write_result
from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp, load_pair
from specheads.decoding.step_times import counted_share, now, step_times
from specheads.decoding.stopping import DraftProduct, FixedLength, HeadThreshold, Logistic, StoppingRule
from specheads.pair.language_model import LanguageModel
from specheads.pair.pair import Pair

WARPS = {"greedy": Warp(temperature=0.0), "sampled": Warp(top_k=50)}
VERIFIED = (3, 5, 9)  # tokens that a verification reads: the drafted ones and the last committed one
SHAPES, LONGEST = ((0, 20), (1, 8), (1, 20), (3, 8), (3, 20), (3, 64), (3, 160)), 8  # depth and width of heads; of drafts
NAMES = [Column(name) for name in ("model", "type", "mode")]
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


def _step_tables(pairs: Iterable[tuple[str, str, Pair]], given: Namespace) -> list[Table]:
    """Return the ratios of steps and their times, for pairs by model and type."""
    times, ratios = list[list[Value]](), list[list[Value]]()
    for model, dtype, pair in pairs:
        limit = bandwidth(pair.target_lm.device)
        head = AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size)).to(pair.draft_lm.device).requires_grad_(False)
        for mode, warp in WARPS.items():
            decoder = SpeculativeDecoder(pair, stopping=HeadThreshold(head), warp=warp, engine=given.engine)
            seconds = seconds_of(decoder, given.context, given.repeats)
            for name, taken in seconds.items():
                read = weight_bytes(pair.draft_lm if name.startswith(DRAFT) else pair.target_lm)
                times.append([model, dtype, mode, name, taken, read / taken / limit])
            over = [seconds[f"verification of {count}"] / seconds[ALONE] for count in VERIFIED]
            ratios.append([model, dtype, mode, *over, seconds[DRAFT_WITH_HEAD] / seconds[DRAFT]])
    over = [*(Column(f"{count} tokens", "ratio") for count in VERIFIED), Column("draft step with head over one without", "ratio")]
    title = f"Time over a step of the target alone, median of {given.repeats}, {given.context} positions of context"
    columns = [Column("step"), Column("time", "ms:3"), Column("weights read at, of a large copy's bandwidth", "percent")]
    steps = Table("times", f"The steps, median of {given.repeats}", [*NAMES, *columns], times)
    return [Table("ratios", title, [*NAMES, *over], ratios), steps]


def _rule_table(pairs: Iterable[tuple[str, str, Pair]], given: Namespace) -> Table:
    """Return the times of draft steps with rules that never stop, for pairs by model and type."""
    rows: list[list[Value]] = []
    for model, dtype, pair in pairs:
        rules = _rules_of(pair)
        for mode, warp in WARPS.items():
            decoder = SpeculativeDecoder(pair, stopping=FixedLength(LONGEST), warp=warp, engine=given.engine)
            times = step_times(decoder, {name: rule for name, (rule, _) in rules.items()}, given.context, given.repeats, ())
            fixed = times.costs.draft_seconds
            rows.append([model, dtype, mode, "fixed length", fixed, 0.0, None])
            for name, (_, counted) in rules.items():
                seconds = fixed + times.rules[name].step_seconds
                rows.append([model, dtype, mode, name, seconds, times.share(name), counted])
    columns = [Column("rule"), Column("time", "ms:4"), Column("over the fixed length", "signed_percent")]
    columns = [*NAMES, *columns, Column("counted from weights", "percent:1")]
    return Table("rules", f"A draft step with rules that never stop, medians of {given.repeats}", columns, rows)


def _rules_of(pair: Pair) -> dict[str, tuple[StoppingRule, float | None]]:
    """Return the rules by name, with the share of a draft step that is counted from the weights of a head."""
    rules: dict[str, tuple[StoppingRule, float | None]] = {
        "product of the draft's probabilities": (DraftProduct(1.0, max_tokens=LONGEST), None),
        "logistic of the largest probability": (Logistic({"logit_max_prob": 1.0, "bias": 0.0}, 1.0, max_tokens=LONGEST), None),
    }
    every = HeadConfig(1).inputs
    heads = {f"head, depth {depth}, width {width}": (depth, width, every) for depth, width in SHAPES}
    for left_out in (("embedding",), ("max_prob", "entropy"), ("embedding", "max_prob", "entropy")):
        kept = tuple(name for name in every if name not in left_out)
        heads[f"head, depth 3, width 20, without {', '.join(left_out)}"] = 3, 20, kept
    for name, (depth, width, inputs) in heads.items():
        config = HeadConfig(pair.draft_lm.hidden_size, depth, inputs=inputs, width=width, vocab_size=pair.vocab_size)
        head = AcceptanceHead(config).eval().requires_grad_(False)
        rules[name] = HeadThreshold(head, 1.0, max_tokens=LONGEST), counted_share(head, pair.draft_lm)
    return rules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["nano", "synthetic-21m", "synthetic-300m"], metavar="NAME")
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"], metavar="TYPE")
    parser.add_argument("--rules", action="store_true", help="time draft steps by rule instead")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--context", type=int, default=256, help="positions in memory")
    parser.add_argument("--repeats", type=int, default=40)
    add_keep_option(parser, "steps")
    given = parser.parse_args()
    torch.manual_seed(0)
    pairs = ((model, dtype, load_pair(model, dtype=dtype)) for model in given.models for dtype in given.types)
    tables = [_rule_table(pairs, given)] if given.rules else _step_tables(pairs, given)
    for table in tables:
        print(f"{table.title}\n\n{text_of(table)}\n")
    write_result("steps", tables, seeds=[0], notes="Synthetic models have random weights.", keep=given.keep)


if __name__ == "__main__":
    main()
