"""What does a head add to a draft step on the engine, by its shape and its inputs, and what would be left to save?

    python benchmarks/head_cost.py [--model mini] [--repeats 400]

Times compiled draft steps, forward pass and all that follows it, at a context of 256 positions, with rules that never stop: a
fixed length, rules on the draft's confidence, and heads of random weights. As in decoding, four steps run in a row after a step
of the target; rules take turns in random order.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_keep_option, text_of, write_result
from benchmarks.steps import IN_A_ROW, place
from specheads import AcceptanceHead, HeadConfig, Pair, SpeculativeDecoder, Warp, load_pair
from specheads.decoding.baseline import Baseline
from specheads.decoding.drafting.autoregressive import ChainState
from specheads.decoding.engine import compile_ahead
from specheads.decoding.stopping import DraftProduct, FixedLength, HeadThreshold, Logistic, StoppingRule
from specheads.heads.cost import counted_share

FIXED = "fixed length"
SHAPES = ((0, 20), (1, 8), (1, 20), (3, 8), (3, 20), (3, 64), (3, 160))  # depth and width
CONTEXT, LONGEST = 256, 8
WARPS = {"greedy": Warp(temperature=0.0), "sampled": Warp(top_k=50)}


def head_rule(pair: Pair, depth: int, width: int, inputs: tuple[str, ...] = ()) -> tuple[StoppingRule, float]:
    """Return a rule with a head that never stops before LONGEST, and the head's counted share of a draft step."""
    config = HeadConfig(pair.draft_lm.hidden_size, depth, inputs=inputs, width=width, vocab_size=pair.vocab_size)
    head = AcceptanceHead(config).eval().requires_grad_(False)
    return HeadThreshold(head, 1.0, max_tokens=LONGEST), counted_share(head, pair.draft_lm)


def rules_of(pair: Pair) -> dict[str, tuple[StoppingRule, float | None]]:
    """Return the rules by name, with the counted share of those that have a head."""
    rules: dict[str, tuple[StoppingRule, float | None]] = {FIXED: (FixedLength(LONGEST), None)}
    rules["product of the draft's probabilities"] = DraftProduct(1.0, max_tokens=LONGEST), None
    rules["logistic of the largest probability"] = Logistic({"logit_max_prob": 1.0, "bias": 0.0}, 1.0, max_tokens=LONGEST), None
    rules |= {f"head, depth {depth}, width {width}": head_rule(pair, depth, width) for depth, width in SHAPES}
    inputs = HeadConfig(1).inputs
    for left_out in (("embedding",), ("max_prob", "entropy"), ("embedding", "max_prob", "entropy")):
        kept = tuple(name for name in inputs if name not in left_out)
        rules[f"head, depth 3, width 20, without {', '.join(left_out)}"] = head_rule(pair, 3, 20, kept)
    return rules


@torch.no_grad()
def seconds_of(pair: Pair, warp: Warp, rules: Mapping[str, tuple[StoppingRule, float | None]], repeats: int) -> dict[str, float]:
    """Return the median seconds of a draft step with each rule."""
    first = SpeculativeDecoder(pair, stopping=rules[FIXED][0], warp=warp)
    decoders = {name: first.with_stopping(rule) for name, (rule, _) in rules.items()}
    target = Baseline(pair, warp, first.target_engine)
    makers = [each.prepare for each in (*decoders.values(), target)]
    compile_ahead(makers)
    for prepare in makers:
        prepare()
    device = pair.target_lm.device
    uniform = torch.zeros(1, dtype=torch.float64, device=device)
    ends = torch.zeros(pair.vocab_size, dtype=torch.bool, device=device)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    states = {
        name: ChainState(torch.zeros(1, dtype=torch.bool, device=device), each.stopping.start_prompt(1, device))
        for name, each in decoders.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in rules}
    for _ in range(repeats):
        for name in random.sample(list(rules), len(rules)):
            place(first.target_engine, CONTEXT)
            target._compiled_step(token, uniform)
            each, state, start = decoders[name], states[name], time.perf_counter()
            for index in range(IN_A_ROW):
                place(each.draft_engine, CONTEXT)
                state = each._drafter._step(token, first._memory.indices[index], uniform, ends, state)  # type: ignore[union-attr]
                state.stopped.item()
            taken[name].append((time.perf_counter() - start) / IN_A_ROW)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


COLUMNS = [Column("decoding"), Column("rule"), Column("time", "ms:4"), Column("over the fixed length", "signed_percent")]
COLUMNS.append(Column("counted from weights", "percent:1"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--repeats", type=int, default=400)
    add_keep_option(parser, "head_cost")
    given = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    pair = load_pair(given.model)
    rules, rows = rules_of(pair), list[list[Value]]()
    for decoding, warp in WARPS.items():
        seconds = seconds_of(pair, warp, rules, given.repeats)
        rows += [[decoding, name, taken, taken / seconds[FIXED] - 1, rules[name][1]] for name, taken in seconds.items()]
    title = f"A draft step of {given.model} with rules that never stop, medians of {given.repeats}"
    table = Table("steps", title, COLUMNS, rows)
    print(text_of(table))
    write_result("head_cost", [table], seeds=[0], keep=given.keep)


if __name__ == "__main__":
    main()
