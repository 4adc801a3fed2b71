"""What does a head add to a draft step on the engine, by its shape and its inputs, and what would be left to save?

    python benchmarks/head_cost.py [--model mini] [--repeats 400]

Times draft steps as steps.py does, with rules that never stop: a fixed length, rules on the draft's confidence, and heads of
random weights.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_keep_option, text_of, write_result
from benchmarks.steps import WARPS
from specheads import AcceptanceHead, HeadConfig, Pair, SpeculativeDecoder, load_pair
from specheads.decoding.step_times import counted_share, step_times
from specheads.decoding.stopping import DraftProduct, FixedLength, HeadThreshold, Logistic, StoppingRule

SHAPES = ((0, 20), (1, 8), (1, 20), (3, 8), (3, 20), (3, 64), (3, 160))  # depth and width
CONTEXT, LONGEST = 256, 8
COLUMNS = [Column("decoding"), Column("rule"), Column("time", "ms:4"), Column("over the fixed length", "signed_percent")]
COLUMNS.append(Column("counted from weights", "percent:1"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--repeats", type=int, default=400)
    add_keep_option(parser, "head_cost")
    given = parser.parse_args()
    torch.manual_seed(0)
    pair = load_pair(given.model)
    rules, rows = _rules_of(pair), list[list[Value]]()
    for decoding, warp in WARPS.items():
        decoder = SpeculativeDecoder(pair, stopping=FixedLength(LONGEST), warp=warp)
        times = step_times(decoder, {name: rule for name, (rule, _) in rules.items()}, CONTEXT, given.repeats, ())
        fixed = times.costs.draft_seconds
        rows.append([decoding, "fixed length", fixed, 0.0, None])
        for name, (_, counted) in rules.items():
            rows.append([decoding, name, fixed + times.rules[name].step_seconds, times.share(name), counted])
    title = f"A draft step of {given.model} with rules that never stop, medians of {given.repeats}"
    table = Table("steps", title, COLUMNS, rows)
    print(text_of(table))
    write_result("head_cost", [table], seeds=[0], keep=given.keep)


def _rules_of(pair: Pair) -> dict[str, tuple[StoppingRule, float | None]]:
    """Return the rules by name, with the share of a draft step that is counted from the weights of a head."""
    rules: dict[str, tuple[StoppingRule, float | None]] = {}
    rules["product of the draft's probabilities"] = DraftProduct(1.0, max_tokens=LONGEST), None
    rules["logistic of the largest probability"] = Logistic({"logit_max_prob": 1.0, "bias": 0.0}, 1.0, max_tokens=LONGEST), None
    rules |= {f"head, depth {depth}, width {width}": _head_rule(pair, depth, width) for depth, width in SHAPES}
    inputs = HeadConfig(1).inputs
    for left_out in (("embedding",), ("max_prob", "entropy"), ("embedding", "max_prob", "entropy")):
        kept = tuple(name for name in inputs if name not in left_out)
        rules[f"head, depth 3, width 20, without {', '.join(left_out)}"] = _head_rule(pair, 3, 20, kept)
    return rules


def _head_rule(pair: Pair, depth: int, width: int, inputs: tuple[str, ...] = ()) -> tuple[StoppingRule, float]:
    """Return a rule with a head that never stops before LONGEST, and the head's counted share of a draft step."""
    config = HeadConfig(pair.draft_lm.hidden_size, depth, inputs=inputs, width=width, vocab_size=pair.vocab_size)
    head = AcceptanceHead(config).eval().requires_grad_(False)
    return HeadThreshold(head, 1.0, max_tokens=LONGEST), counted_share(head, pair.draft_lm)


if __name__ == "__main__":
    main()
