"""Which threshold suits which head of the paper's grid, and does a single setting serve every set of prompts?

    python benchmarks/head_grid.py [--model nano] [--seeds 0 1 2]

Trains the 20 heads of SpecDec++ (depths 0 to 4, reject weights 1, 3, 6 and 12, the paper's recipe; one pass for each seed), and
replays them at every threshold on dev prompts, on test prompts and on HumanEval. A head's own cost is not counted, as in the
paper, whose draft has 7B parameters.
"""

import argparse
import logging
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_dir

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.head_kinds import RULES, Kind, all_heads, over_seeds, shown
from benchmarks.results import Column, Table, Value, add_result_option, prompt_record, text_of, write_result
from specheads import load_pair
from specheads.commands.evaluation import evaluation_settings, prompt_data
from specheads.decoding.stopping import HeadThreshold
from specheads.evaluation.candidate import Candidate
from specheads.evaluation.candidates import candidates
from specheads.evaluation.recordings import record
from specheads.evaluation.replayed_sets import Choices, ReplayedSet, choose, replay_all
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.setup import Setup
from specheads.evaluation.tuning import Tuning
from specheads.pair_config import config_folder

WEIGHTS = (1.0, 3.0, 6.0, 12.0)
GRID = ("experiment=specdecpp", "head.depth=[0,1,2,3,4]", f"loss.reject_weight=[{','.join(map(str, WEIGHTS))}]")

Setting = tuple[Kind, float]  # heads, one for each seed, and their threshold


def best_thresholds(
    heads: Mapping[str, Kind], rules: Sequence[Candidate], choices: Choices, ratios: Sequence[str]
) -> list[list[Value]]:
    """Return a row for each reject weight: the best thresholds of its heads at each ratio, mean and range over heads."""
    rows: list[list[Value]] = []
    for weight in WEIGHTS:
        names = [name for name, kind in heads.items() if kind.reject_weight == weight]
        row: list[Value] = [weight, len(names)]
        for ratio in ratios:
            best = [rules[choices.best[ratio][f"head_threshold {name}"]].rule for name in names]
            thresholds = np.array([rule.threshold for rule in best if isinstance(rule, HeadThreshold)])
            error = 1.96 * float(thresholds.std(ddof=1)) / len(thresholds) ** 0.5
            mean = float(thresholds.mean())
            row.append({"value": mean, "low": mean - error, "high": mean + error})
        rows.append(row)
    return rows


def speeds(
    table: ReplayedSet, heads: Mapping[str, Kind], rules: Sequence[Candidate], costs: CostTable, ratio: str
) -> dict[Setting, np.ndarray]:
    """Return the speed-ups (R,) of each setting on one set of prompts, the mean over seeds."""
    by_setting: dict[Setting, list[np.ndarray]] = defaultdict(list)
    for counts, rule in zip(table.counts, rules, strict=False):  # the oracle's counts come last
        if isinstance(rule.rule, HeadThreshold) and rule.head is not None:
            setting = heads[rule.head], rule.rule.threshold
            by_setting[setting].append(costs.speedup(counts, table.resamples, rule, ratio))
    return {setting: over_seeds(samples) for setting, samples in by_setting.items()}


def single_setting(
    tables: Sequence[ReplayedSet], heads: Mapping[str, Kind], rules: Sequence[Candidate], costs: CostTable, ratios: Sequence[str]
) -> list[list[Value]]:
    """Return a row for each set and ratio: the setting that is the best on dev prompts, over the best setting of the set."""
    rows: list[list[Value]] = []
    for ratio in ratios:
        dev = speeds(tables[0], heads, rules, costs, ratio)
        chosen = max(dev, key=lambda setting: dev[setting][0])
        for table in tables[1:]:
            there = speeds(table, heads, rules, costs, ratio)
            best = max(there, key=lambda setting: there[setting][0])
            rows.append([table.name, ratio, *map(described, (chosen, best)), shown(there[chosen] / there[best])])
    return rows


def described(setting: Setting) -> str:
    """Return a setting in the paper's terms."""
    kind, threshold = setting
    return f"depth {kind.depth}, reject weight {kind.reject_weight:g}, threshold {threshold:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano", help="a file of conf/model, on the prompts of the embedded pairs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--humaneval", type=Path, help="a JSONL file of HumanEval prompts, a further set")
    add_result_option(parser, "head_grid")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    kinds = all_heads(given.model, {"the paper's grid": GRID}, given.seeds)
    words = [f"model={given.model}", "num_prompts=1000", "num_dev_prompts=200", *RULES, "costs.head_share=0", "paths.run=."]
    words += [f"test_sets={{humaneval: {given.humaneval.resolve()}}}"] * (given.humaneval is not None)
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        cfg = compose("evaluate", words)
    heads = {f"{number}-{seed}": kind for number, kind in enumerate(kinds) for seed in given.seeds}
    located = dict(zip(heads, (head for of_kind in kinds.values() for head in of_kind), strict=True))
    setup = Setup(
        load_pair(given.model), located, evaluation_settings(cfg), prompt_data(cfg), Path(cfg.paths.data), Path(cfg.paths.run)
    )
    recorded, costs = record(setup), setup.counted_costs()
    rules = candidates(setup.rules, setup.heads, Tuning(recorded[0].recording, costs))
    tables, ratios = replay_all(recorded, rules), list(costs.costs)
    choices = choose(tables[0], rules, costs)
    columns = [Column("reject weight", "fixed:0"), Column("heads", "fixed:0"), *(Column(f"at {r}", "fixed:3") for r in ratios)]
    title = f"{given.model}: the best threshold on dev prompts, mean over depths and seeds, with its 95 % interval"
    thresholds = Table("thresholds", title, columns, best_thresholds(heads, rules, choices, ratios))
    columns = [Column("prompts"), Column("ratio"), Column("best on dev prompts"), Column("best there")]
    columns.append(Column("throughput of the first over the second", "percent:1"))
    title = f"{given.model}: one setting, chosen on dev prompts, on other prompts"
    single = Table("single", title, columns, single_setting(tables, heads, rules, costs, ratios))
    print("\n\n".join(f"{table.title}\n\n{text_of(table)}" for table in (thresholds, single)))
    prompts = list(setup.prompts.recorded().values())[1].prompts
    record_of = prompt_record([prompt.prompt_id for prompt, _ in prompts])
    write_result(given.result, [thresholds, single], split="test, read before", seeds=given.seeds, prompts=record_of)


if __name__ == "__main__":
    main()
