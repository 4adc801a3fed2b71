"""Every stopping rule and two kinds of heads on the same recordings: which is the fastest at each ratio of costs?

    python benchmarks/rules.py [--pairs mini nano] [--decoding sampled greedy] [--seeds 0 1 2]      # test prompts
    python benchmarks/rules.py split=final 'data.final_part=[4,5]' 'test_sets={humaneval: humaneval.jsonl}'

For each seed `specheads train` trains a head, and the kind that SpecDec++ describes; responses, initial weights and the order of
the prompts differ by seed. `specheads evaluate` replays every rule of conf/stopping. A rule's values, such as its threshold, are
chosen on dev prompts at each ratio; a head pays for its computing in every draft step, as counted from its weights. A figure is
the mean over seeds, and its interval reaches from the lowest limit of a seed to the highest.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import ROOT
from benchmarks.results import Column, Table, Value, add_keep_option, interval, text_of, write_result

HEADS = {  # the name of a head, and what `specheads train` is told
    "head": (),
    "the paper's": ("head.predicts=input_token", "mixing.response_share=0.15", "loss.reject_weight=6.0", "calibration=null"),
}
GREEDY = ("warp.temperature=0", "generation.responses_per_prompt=2")
THRESHOLDS = [round(0.05 * step, 2) for step in range(1, 20)]
EVALUATED = (
    "live=none",
    "num_prompts=1000",
    "num_dev_prompts=200",
    f"thresholds={THRESHOLDS}",
    f"fixed_lengths={[*range(1, 21)]}",
)
RATIOS = ("5", "10", "20")
COLUMNS = [*(Column(name) for name in ("pair", "decoding", "prompts", "rule")), Column("head's cost", "percent:1")]
COLUMNS += [Column(f"speed-up at {ratio}", "ratio:3") for ratio in RATIOS]
for measure in ("of the ceiling", "of the oracle", "gain", "break-even"):
    COLUMNS += [Column(f"{measure} at {ratio}", "signed_percent" if measure == "gain" else "percent") for ratio in RATIOS]

Report = Mapping[str, Any]  # the content of report.json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=["mini", "nano"], help="files of conf/model")
    parser.add_argument("--decoding", nargs="+", choices=("sampled", "greedy"), default=["sampled", "greedy"])
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS), metavar="HEAD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("words", nargs="*", help="more words for specheads evaluate, such as split=final")
    add_keep_option(parser, "rules")
    given = parser.parse_intermixed_args()
    rows: list[list[Value]] = []
    for pair in given.pairs:
        for decoding in given.decoding:
            greedy = GREEDY if decoding == "greedy" else ()
            reports = {
                head: [
                    evaluated(pair, f"{decoding}/{head}/{seed}", seed, (*HEADS[head], *greedy), given.words)
                    for seed in given.seeds
                ]
                for head in given.heads
            }
            rows += ([pair, decoding, *row] for row in _rows_of(reports))
            print(text_of(Table("rules", "", COLUMNS, [row for row in rows if row[:2] == [pair, decoding]])), flush=True)
    context = reports[given.heads[0]][0]["context"]
    read = {
        name: {"hash": each["sha256"], "number": each["num_prompts"], "python": each.get("python")}
        for name, each in context["prompts"].items()
    }
    parts = context.get("final_parts", ())
    split = f"final, part {', '.join(map(str, parts))}" if parts else "test, read before"
    table = Table("rules", "The best of each rule's values on dev prompts", COLUMNS, rows)
    write_result("rules", [table], split=split, seeds=given.seeds, prompts=read, final_parts=parts, keep=given.keep)


def evaluated(pair: str, name: str, seed: int, training: Sequence[str], words: Sequence[str]) -> Report:
    """Return the report of one head, which is trained first if it is not there yet."""
    outputs = ROOT / "outputs" / "rules" / pair / name.replace(" ", "_").replace("'", "")
    decoding = [word for word in training if word.startswith("warp.")]
    shared = [f"model={pair}", f"paths.outputs={outputs}", f"seed={seed}"]
    if not list(outputs.glob("head/*/heads/*/config.json")):
        run("train", *shared, *training)
    run("evaluate", *shared, *decoding, *EVALUATED, *words)
    return json.loads(max(outputs.glob("evaluate/*/report.json")).read_text())


def run(*words: str) -> None:
    """Run a command of this project to its end."""
    command = [sys.executable, "-m", "specheads", *words]
    print(shlex.join(command[1:]), file=sys.stderr, flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def _rows_of(reports: Mapping[str, Sequence[Report]]) -> Iterator[list[Value]]:
    """Yield a row for each set of test prompts and rule: rules without a head once, those with one for each kind of head."""
    first = next(iter(reports))
    for place, data in enumerate(reports[first][0]["data_sets"]):
        if data["role"] == "dev":
            continue
        for head, by_seed in reports.items():
            winners = [report["data_sets"][place]["winners"] for report in by_seed]
            for family in dict.fromkeys(winner["family"] for winner in winners[0]):
                by_key = [{(winner["family"], winner["ratio"]): winner for winner in each} for each in winners]
                chosen = {ratio: [each[family, ratio] for each in by_key] for ratio in RATIOS}
                has_head = chosen[RATIOS[0]][0]["head_share"] is not None
                if has_head or head == first:
                    name = family.replace("_", " ") + (f", {head}" if has_head else "")
                    yield [data["name"], name, *figures(chosen)]


def figures(chosen: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Value]:
    """Return the columns of a rule from its winners by ratio, one for each seed."""
    shares = [winner["head_share"] for winner in chosen[RATIOS[0]]]
    row: list[Value] = [None if None in shares else statistics.fmean(shares)]
    for field in ("speedup", "gap_ceiling", "gap_oracle", "gain", "break_even"):
        for winners in chosen.values():
            each = [winner[field] for winner in winners]
            row.append(None if None in each else _over_seeds(each, 1.0 if field == "gain" else 0.0))
    return row


def _over_seeds(each: Sequence[Mapping[str, float]], less: float) -> Value:
    """Return the mean over seeds less a constant, with an interval that holds those of all seeds."""
    values, lows, highs = ([figure[name] for figure in each] for name in ("value", "low", "high"))
    return interval(statistics.fmean(values) - less, min(lows) - less, max(highs) - less)


if __name__ == "__main__":
    main()
