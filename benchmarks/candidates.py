"""Drafts of several candidates next to chains: the acceptance, output and time of each method.

    python benchmarks/candidates.py trees|samples|joint [--prompts 40] [--data humaneval.jsonl] [--engine auto]
    python benchmarks/candidates.py graphs|beams --split dev

Decodes test prompts of nano, or those of a JSONL file, with every method of a table, interleaved prompt by prompt: `trees` at
top-p 0.7 and temperature 0.7 and greedily (GSD's settings), `samples` at temperature 1, top-k 50, `joint` at top-k 20, top-p 0.9
(MJSD's settings). `graphs` and `beams` compare variants of GSD and MJSD at the settings of `trees` and `joint`, without times.
Perplexities are the target's own, of all emitted tokens, without warping.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, prompt_record, text_of, write_result
from specheads import SpeculativeDecoder, Warp, drafting, load_pair, stopping, verification
from specheads.decoding.baseline import Baseline
from specheads.decoding.block_search import BlockSearch
from specheads.decoding.records import DecodeStats
from specheads.evaluation.draft_counts import DraftCounts
from specheads.evaluation.intervals import Groups, interval, resample_counts, sums
from specheads.evaluation.likelihood import response_nats
from specheads.evaluation.quality_rows import candidates_row, perplexity, ratio
from specheads.pair import Pair
from specheads.prompts.nano_source import NUM_READ, NanoSource
from specheads.prompts.prompt import Prompt, groups_of, text_id

MAX_TOKENS, DEPTH = 96, 10
OF_CHILDREN = ["first child accepted", "second child", "repeated bigrams"]
COLUMNS = [
    Column("method"),
    Column("drafted per round", "plus_minus:1"),
    Column("accepted / drafted", "plus_minus"),
    Column("accepted / emitted", "plus_minus:3"),
    Column("tokens per round", "plus_minus"),
    Column("rounds with a copy", "plus_minus:3"),
    Column("perplexity", "plus_minus"),
    Column("speed-up", "plus_minus"),
    Column("first child accepted", "plus_minus"),
    Column("second child", "plus_minus"),
    Column("repeated bigrams", "plus_minus:3"),
]
Make = Callable[[Pair, Warp, str], object]


@dataclass
class Tally:
    """What a method did, prompt by prompt."""

    stats: list[DecodeStats] = field(default_factory=list)
    nats: list[float] = field(default_factory=list)
    drafts: list[DraftCounts] = field(default_factory=list)

    def column(self, name: str) -> np.ndarray:
        return np.array([getattr(generation, name) for generation in self.stats], dtype=float)


def method(way: object, rule: object, stop: stopping.StoppingRule | None = None) -> Make:
    return lambda pair, warp, engine: SpeculativeDecoder(pair, way, stop, rule, warp, engine)


def tree_methods(skipped: Sequence[int]) -> dict[str, Make]:
    """Return chains, trees and graphs with GSD's settings for small pairs."""
    # As many nodes as there are: a limit would cut trees off where graphs need not go.
    wide = {"max_nodes": 500, "max_width": 200}
    small, usual = {"theta_prob": 0.4, "theta_sib": 0.1, **wide}, {"theta_prob": 0.2, "theta_sib": 0.3, **wide}
    sure, deep = stopping.Confidence(0.4, retune=False, max_tokens=DEPTH), stopping.FixedLength(DEPTH)
    match = verification.TreeMatch()
    return {
        "SSD: sampled chain while d >= 0.4 (without warping)": method(
            drafting.Autoregressive(), verification.TokenVerification(), sure
        ),
        "SSD: likeliest chain, theta 0.4": method(drafting.Tree(**small | {"top_k": 1}), match, deep),
        "TSD: theta 0.4, 0.1": method(drafting.Tree(**small), match, deep),
        "GSD: theta 0.4, 0.1, tau 1": method(drafting.Graph(tau=1, max_verified=500, **small), match, deep),
        "GSD: theta 0.4, 0.1, tau 2": method(drafting.Graph(tau=2, max_verified=500, **small), match, deep),
        "TSD: theta 0.2, 0.3": method(drafting.Tree(**usual), match, deep),
        "GSD: theta 0.2, 0.3, tau 1": method(drafting.Graph(tau=1, max_verified=500, **usual), match, deep),
        "GSD: theta 0.2, 0.3, tau 2": method(drafting.Graph(tau=2, max_verified=500, **usual), match, deep),
        f"self-SSD, layers {', '.join(map(str, skipped))} skipped": method(
            drafting.LayerSkip(skipped), verification.TokenVerification(), sure
        ),
        "look-up, 10 tokens": method(drafting.Lookup(), match, deep),
    }


def sample_methods() -> dict[str, Make]:
    """Return rules for i.i.d. chains of four tokens, and chains."""
    four, chain = stopping.FixedLength(4), drafting.Autoregressive()
    methods = {
        "chain, token": method(chain, verification.TokenVerification(), four),
        "chain, block": method(chain, verification.BlockVerification(), four),
        "BiLD, fallback 0.9, rollback 2 (lossy)": method(chain, verification.BigLittle()),
    }
    for count in (2, 4, 8):
        methods[f"{count} chains, SpecTr"] = method(drafting.Multi(count), verification.SpecTr(), four)
        methods[f"{count} chains, multi-round"] = method(drafting.Multi(count), verification.MultiRound(), four)
    methods["4 chains without replacement, multi-round"] = method(
        drafting.Multi(4, replacement=False), verification.MultiRound(), four
    )
    methods["4 chains, batch"] = method(drafting.Multi(4, merge=False), verification.MultiRound(), four)
    methods["4 chains, matching"] = method(drafting.Multi(4), verification.TreeMatch(), four)
    methods["tree, matching, theta 0.1, 0.1"] = method(
        drafting.Tree(theta_prob=0.1, theta_sib=0.1, max_nodes=16), verification.TreeMatch(), four
    )
    return methods


def joint_methods() -> dict[str, Make]:
    """Return joint verification of beams, and the methods that bound it."""
    four = stopping.FixedLength(4)
    methods = {"chain, token": method(drafting.Autoregressive(), verification.TokenVerification(), four)}
    settings = [(beams, 0.1) for beams in (2, 4, 8)] + [(8, tau) for tau in (0.3, 0.5, 0.7, 0.9)]
    for beams, tau in settings:
        methods[f"MJSD, {beams} beams, tau {tau:g} (lossy)"] = method(
            drafting.Beam(beams), verification.JointVerification(tau), four
        )
    methods["8 beams, matching"] = method(drafting.Beam(8), verification.TreeMatch(), four)
    methods["MJGD, 4 tokens, 8 beams (lossy)"] = lambda pair, warp, engine: BlockSearch(pair, 4, 8, warp, engine)
    return methods


def graph_methods() -> dict[str, Make]:
    """Return graphs with other links, and with logits that are shared along them."""
    sizes = {"theta_prob": 0.2, "theta_sib": 0.3, "max_nodes": 500, "max_width": 200}
    deep, methods = stopping.FixedLength(DEPTH), {}
    methods["tree"] = method(drafting.Tree(**sizes), verification.TreeMatch(), deep)
    for tau in (1, 2):
        for same_path, linked_to in [(True, "most_likely"), *((False, link) for link in ("first", "last", "most_likely"))]:
            way = drafting.Graph(tau, 500, linked_to, same_path, **sizes)
            name = f"tau {tau}, " + ("" if same_path else f"path drafted again, {linked_to.replace('_', ' ')}")
            methods[name.strip(", ")] = method(way, verification.TreeMatch(), deep)
        shared = verification.TreeMatch(shared_logits=True)
        methods[f"tau {tau}, shared logits (lossy)"] = method(drafting.Graph(tau, 500, **sizes), shared, deep)
    return methods


def beam_methods() -> dict[str, Make]:
    """Return joint verification of beams that are searched and sampled; 0.9 is the threshold that the authors' code runs with."""
    four, chain = stopping.FixedLength(4), drafting.Autoregressive()
    methods = {"chain, token": method(chain, verification.TokenVerification(), four)}
    for tau in (0.1, 0.9):
        joint = verification.JointVerification(tau)
        methods[f"chain, joint, tau {tau:g} (lossy)"] = method(chain, joint, four)
        for beams, samples in itertools.product((2, 8), (0, 1, 2)):
            how = f"best of {samples * beams} sampled" if samples else "searched"
            methods[f"{beams} beams, {how}, tau {tau:g} (lossy)"] = method(drafting.Beam(beams, samples), joint, four)
    for samples, how in enumerate(("searched", "best of 8 sampled", "best of 16 sampled")):
        methods[f"8 beams, {how}, matching"] = method(drafting.Beam(8, samples), verification.TreeMatch(), four)
    return methods


def run(pair: Pair, methods: dict[str, Make], warp: Warp, prompts: Sequence[Sequence[int]], engine: str) -> dict[str, Tally]:
    """Decode every prompt with every method, in an order that rotates."""
    decoders = {"target alone": Baseline(pair, warp, engine)}
    decoders |= {name: make(pair, warp, engine) for name, make in methods.items()}
    for decoder in decoders.values():
        decoder.warm_up()
        decoder.generate(prompts[0], MAX_TOKENS)
    tallies, names = {name: Tally() for name in decoders}, list(decoders)
    for number, prompt in enumerate(prompts):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            out = decoders[name].generate(prompt, MAX_TOKENS, seed=number)
            tallies[name].stats.append(out.stats)
            tallies[name].nats += response_nats(pair.target_lm, prompt, [out.tokens.tolist()])
            tallies[name].drafts.append(DraftCounts.of(out))
        print(f"{number + 1} of {len(prompts)} prompts", end="\r", file=sys.stderr, flush=True)
    return tallies


def table_rows(tallies: dict[str, Tally], groups: Groups) -> Iterable[list]:
    """Return a row of COLUMNS for each method; `groups`: that of each prompt."""
    counts = resample_counts(groups)
    speeds = {name: sums(tally.stats, counts).tokens_per_second for name, tally in tallies.items()}
    for name, tally in tallies.items():
        tokens, rounds = (tally.column(key) for key in ("num_tokens", "num_target_calls"))
        drafts = candidates_row(tally.stats, tally.drafts, counts) if tally.column("num_drafted").any() else None
        first, last = [None] * 3, [None] * 3
        if drafts:
            first = [drafts.drafted_per_round, drafts.accepted_of_drafted, drafts.accepted_of_emitted]
            last = [drafts.accepted_by_rank.get("1"), drafts.accepted_by_rank.get("2"), drafts.repeated_ngrams.get("2")]
        middle = [
            ratio(tokens, rounds, counts),
            drafts and drafts.graph_success,
            perplexity(np.array(tally.nats), tokens, counts),
            interval(speeds[name] / speeds["target alone"]),
        ]
        yield [name, *([estimate and asdict(estimate) for estimate in (*first, *middle, *last)])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=["trees", "samples", "joint", "graphs", "beams"])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--data", type=Path, help="a JSONL file with `prompt`; default: nano's test prompts")
    parser.add_argument("--split", choices=["dev", "test"], default="test", help="of nano's prompts")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--skipped", type=int, nargs="+", default=[3], help="layers that self-SSD leaves out")
    parser.add_argument("--result", metavar="NAME", help="default: candidates_TABLE, with the data's name; none: keep none")
    arguments = parser.parse_args()
    pair = load_pair("nano")
    if arguments.data:
        rows = [json.loads(line)["prompt"] for line in arguments.data.read_text().splitlines()]
        prompts_read = [Prompt(text_id(text), "test", text) for text in rows]
    else:
        most = min(2 * arguments.prompts, NUM_READ)
        prompts_read = list(NanoSource(0, *((most, 0) if arguments.split == "dev" else (0, most))).load(pair.chats))
    encoded = [(prompt, pair.encode_instruction(prompt.text)) for prompt in prompts_read]
    encoded = [(prompt, ids) for prompt, ids in encoded if len(ids) <= 256][: arguments.prompts]
    prompts, groups = [ids for _, ids in encoded], groups_of(prompt for prompt, _ in encoded)
    methods, warps = {
        "trees": (tree_methods(arguments.skipped), [Warp(0.7, top_p=0.7), Warp(0)]),
        "samples": (sample_methods(), [Warp(1.0, top_k=50)]),
        "joint": (joint_methods(), [Warp(1.0, top_k=20, top_p=0.9)]),
        "graphs": (graph_methods(), [Warp(0.7, top_p=0.7), Warp(0)]),
        "beams": (beam_methods(), [Warp(1.0, top_k=20, top_p=0.9)]),
    }[arguments.table]
    tables = []
    dropped = {"beams": ["rounds with a copy", *OF_CHILDREN, "speed-up"], "graphs": ["speed-up"]}.get(arguments.table, [])
    kept = [place for place, column in enumerate(COLUMNS) if column.name not in dropped]
    for warp in warps:
        rows = list(table_rows(run(pair, methods, warp, prompts, arguments.engine), groups))
        title = f"{warp_text(warp)}; {len(prompts)} prompts, at most {MAX_TOKENS} tokens each"
        title += "; ± half of the 95 % interval over prompts"
        columns, rows = [COLUMNS[place] for place in kept], [[row[place] for place in kept] for row in rows]
        tables.append(Table("greedy" if warp.greedy else "sampled", title, columns, rows))
        print("\n".join(["", title, "", text_of(tables[-1])]))
    name = "_".join(["candidates", arguments.table, *([arguments.data.stem] if arguments.data else [])])
    split = arguments.data.stem if arguments.data else {"dev": "dev", "test": "test, read before"}[arguments.split]
    record = prompt_record(prompt.prompt_id for prompt, _ in encoded)
    write_result(arguments.result or name, tables, split=split, seeds=range(len(prompts)), prompts=record)


def warp_text(warp: Warp) -> str:
    """Return how tokens are sampled, in words."""
    if warp.greedy:
        return "Greedy"
    limits = [f"top-k {warp.top_k}"] * (warp.top_k > 0) + [f"top-p {warp.top_p:g}"] * (warp.top_p < 1)
    return ", ".join([f"Temperature {warp.temperature:g}", *limits])


if __name__ == "__main__":
    main()
