"""Does replay agree with decoding, and how long does it take? Both on the same prompts, in one run.

    python benchmarks/replay.py --head outputs/head/<date_time>/heads/next_token-d3-r1 [--prompts 100] [--repeats 4]

Agreement: target calls and discarded tokens per emitted token of five rules, decoded live (each prompt `--repeats` times) and
replayed; the difference in standard errors over prompts, each prompt's difference being one sample. Time: recording, predictions
of 20 untrained heads and replaying these at 9 thresholds with every other rule, against one live pass over the same prompts.
"""

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, prompt_record, text_of, write_result
from specheads import AcceptanceHead, HeadConfig, Pair, SpeculativeDecoder, Warp, load_head, load_pair, stopping
from specheads.commands.evaluation import evaluation_settings, prompt_data
from specheads.evaluation.candidate import RuleChoice
from specheads.evaluation.candidates import candidates, longest_draft
from specheads.evaluation.head_folders import LocatedHead
from specheads.evaluation.prompt_sets import PromptSets
from specheads.evaluation.recordings import RecordedSet
from specheads.evaluation.replayed_sets import ReplayedSet
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.tuning import Tuning
from specheads.heads.cost import counted_share
from specheads.pair_config import config_folder
from specheads.prompts.encoding import ResponseLimits
from specheads.replay.cost import Costs
from specheads.replay.head_scores import add_predictions, head_fingerprint
from specheads.replay.recording import GROUND_TRUTH, load_recording, make_recording
from specheads.replay.replay import recorded_head, replay
from specheads.replay.response_tree import RecordSettings

COLUMNS = [
    Column("rule"),
    Column("target calls, decoded", "fixed:4"),
    Column("target calls, replayed", "fixed:4"),
    Column("z of calls", "fixed"),
    Column("discards, decoded", "fixed:4"),
    Column("discards, replayed", "fixed:4"),
    Column("z of discards", "fixed"),
]


def five_rules(head: AcceptanceHead) -> dict[str, list[stopping.StoppingRule]]:
    """Return rules by name, as they decode and as they are replayed."""
    return {
        "fixed K=4": [stopping.FixedLength(4)] * 2,
        "head 0.6": [stopping.HeadThreshold(asked, 0.6) for asked in (head, recorded_head(head))],
        "max probability 0.4": [stopping.MaxProbability(0.4, 20)] * 2,
        "online logistic 0.7": [stopping.OnlineLogistic(threshold=0.7)] * 2,
        "heuristic": [stopping.Heuristic()] * 2,
    }


def live_counts(
    pair: Pair, rule: stopping.StoppingRule, warp: Warp, prompts, repeats: int, limit: int, engine: str
) -> np.ndarray:
    """Return tokens, target calls and discards of each prompt (P, 3), sums over repeats."""
    decoder = SpeculativeDecoder(pair, stopping=rule, warp=warp, engine=engine)
    stats = [
        [decoder.generate(ids, limit, seed=1000 * repeat + n).stats for repeat in range(repeats)]
        for n, (_, ids) in enumerate(prompts)
    ]
    names = ("num_tokens", "num_target_calls", "num_discarded")
    return np.array([[sum(getattr(part, name) for part in row) for name in names] for row in stats], dtype=float)


def agreement(live: np.ndarray, replayed: np.ndarray) -> list[tuple[float, float, float]]:
    """Return (live rate, replayed rate, difference in standard errors) of calls and of discards per token."""
    rows = []
    for column in (1, 2):
        rates = [counts[:, column].sum() / counts[:, 0].sum() for counts in (live, replayed)]
        # The error of a ratio of sums, over prompts.
        errors = [(c[:, column] - rate * c[:, 0]) / c[:, 0].mean() for c, rate in zip((live, replayed), rates, strict=True)]
        spread = (errors[0] - errors[1]).std(ddof=1) / len(live) ** 0.5
        rows.append((*rates, (rates[0] - rates[1]) / spread if spread else 0.0))
    return rows


def compare(
    pair: Pair, prompts, warp: Warp, head: AcceptanceHead, arguments: argparse.Namespace, limit: int, folder: Path
) -> Table:
    """Return target calls and discarded tokens per emitted token, decoded and replayed."""
    settings = RecordSettings(8, 20, 64)
    path = make_recording(pair, prompts, warp, ResponseLimits(limit), settings, 0, folder)
    add_predictions(path, pair, {head_fingerprint(head): head}, ground_truth=False)
    recording = load_recording(path, [head_fingerprint(head)])
    repeats, rows = 1 if warp.greedy else arguments.repeats, []
    for name, (live, recorded) in five_rules(head).items():
        counts = replay(recording, [recorded])[0].per_prompt(len(prompts))
        replayed = np.stack([counts.tokens, counts.target_calls, counts.discarded], axis=1)
        calls, discards = agreement(live_counts(pair, live, warp, prompts, repeats, limit, arguments.engine), replayed)
        rows.append([name, *calls, *discards])
    mode = "greedy" if warp.greedy else "sampled"
    title = f"{mode.capitalize()}, {len(prompts)} prompts, decoded {'once' if repeats == 1 else f'{repeats} times'} each"
    return Table(mode, title, COLUMNS, rows)


def times(pair: Pair, prompts, warp: Warp, rules: dict, arguments: argparse.Namespace, limit: int, folder: Path) -> Table:
    """Return how long every step took, and their sum, in seconds and in live passes."""
    size, heads = pair.draft_lm.hidden_size, {}
    for number in range(20):
        torch.manual_seed(number)
        heads[f"untrained {number}"] = AcceptanceHead(HeadConfig(size, number % 5)).eval().requires_grad_(False)
    arguments_of_head = {**rules["head_threshold"].arguments, "threshold": [t / 10 for t in range(1, 10)]}
    rules["head_threshold"] = RuleChoice(rules["head_threshold"].cls, arguments_of_head)
    rules.pop("expected_throughput")
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(4), warp=warp, engine=arguments.engine)
    decoder.warm_up()
    marks = [time.perf_counter()]
    for number, (_, ids) in enumerate(prompts):
        decoder.generate(ids, limit, seed=number)
    marks.append(time.perf_counter())
    settings = RecordSettings(arguments.samples, longest_draft(rules), 64)
    path = make_recording(pair, prompts, warp, ResponseLimits(limit), settings, 1, folder)
    marks.append(time.perf_counter())
    named = {head_fingerprint(head): head for head in heads.values()}
    add_predictions(path, pair, named, ground_truth=False)
    marks.append(time.perf_counter())
    add_predictions(path, pair, {}, ground_truth=True)
    marks.append(time.perf_counter())
    recording = load_recording(path, [*named, GROUND_TRUTH])
    cost_table = CostTable({"10": Costs.at_ratio(10)}, {name: counted_share(head, pair.draft_lm) for name, head in heads.items()})
    tried = candidates(rules, heads, Tuning(recording, cost_table))
    ReplayedSet.of(RecordedSet("test", "test", recording, None), tried)
    marks.append(time.perf_counter())
    live, *steps = np.diff(marks)
    names = ("record", "20 heads predict at every node", "the target's probabilities, for the ceiling", "replay all rules")
    rows = [[name, seconds, seconds / live] for name, seconds in zip(names, steps, strict=True)]
    rows += [["all steps", sum(steps), sum(steps) / live], ["one live pass, fixed K=4", live, 1.0]]
    title = (
        f"Time for {len(prompts)} prompts, sampled, {settings.num_samples} draw{'s' * (settings.num_samples > 1)} per response"
    )
    title += f"; {len(tried)} rules"
    return Table("time", title, [Column("step"), Column("seconds", "fixed:1"), Column("live passes", "fixed")], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", required=True)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1, help="acceptance samples per response, where time is measured")
    parser.add_argument("--engine", default="auto")
    add_result_option(parser, "replay")
    parser.add_argument("--only", choices=("agreement", "time"), default=None)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        cfg = compose("evaluate", overrides=[f"model={arguments.model}", "paths.run=."])
    pair, head, settings = load_pair(arguments.model), load_head(arguments.head), evaluation_settings(cfg)
    sampled, limit = settings.warp, settings.max_new_tokens
    reported = PromptSets(prompt_data(cfg), pair, {arguments.head: LocatedHead(head, arguments.head)}, settings).reported
    prompts = reported.first(arguments.prompts).prompts
    tables = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.only != "time":
            for warp in (sampled, Warp(0)):
                tables.append(compare(pair, prompts, warp, head, arguments, limit, folder))
                print(f"\n{tables[-1].title}\n\n{text_of(tables[-1])}", flush=True)
        if arguments.only != "agreement":
            tables.append(times(pair, prompts, sampled, dict(settings.rules), arguments, limit, folder))
            print(f"\n{tables[-1].title}\n\n{text_of(tables[-1])}", flush=True)
    seeds = [1000 * repeat for repeat in range(arguments.repeats)]
    record = prompt_record(prompt.prompt_id for prompt, _ in prompts)
    write_result(arguments.result, tables, split="test, read before", seeds=seeds, prompts=record)


if __name__ == "__main__":
    main()
