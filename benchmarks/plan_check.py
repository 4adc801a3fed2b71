"""Does a plan predict what the stages take on this machine?

    python benchmarks/plan_check.py overheads [--prompts 400] [--eval-prompts 40]
    python benchmarks/plan_check.py stages [--prompts 1000] [--eval-prompts 100]

Both run `specheads data`, `train` and `evaluate` on the embedded nano in an empty folder, and time their stages by what they log.
A small run before compiles what they use. `overheads` keeps how many times as long each stage takes as its products and reads at
the rates of a large batch: a small model on a CPU does much else. `specheads plan gpu=cpu` reads them. `stages` compares another,
larger run with that plan, which is given the lengths of the texts, the acceptance and the number of decodings that were found.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, text_of, write_result
from specheads.commands.plan import planned
from specheads.plan.settings import PlanSettings
from specheads.plan.stages import plan

ROOT = Path(__file__).parents[1]
EPOCHS, LIVE, MAX_NEW_TOKENS = 12, 32, 128
STAGES = {  # by stage of a plan, or several of one command: the command, and parts of the lines that begin and end it
    ("responses", "labels"): ("data", "still to do, in", None),
    ("heads",): ("train", "features: at most", "calibrating"),
    ("recording",): ("evaluate", "recording: ", "predicting"),
    ("predictions",): ("evaluate", "predicting", "costs: "),
}
GENERATIONS = ("generations.jsonl", "generations-turn-2.jsonl", "dev-trial.jsonl")  # what an evaluation decodes, with seconds
PROMPTS = {"overheads": (400, 40), "stages": (1000, 100)}  # of all splits, and those that are recorded


@dataclass(frozen=True)
class Run:
    """The seconds of a run's stages, and what it measured that a plan assumes otherwise."""

    seconds: dict[tuple[str, ...], float]
    prompt_tokens: float
    response_tokens: float
    acceptance: float
    decodings: int

    def keys(self, prompts: int, eval_prompts: int) -> list[str]:
        """Return the keys of a plan of the same run."""
        keys = ["gpu=cpu", "gpus=1", "model=nano", f"prompts={prompts}", f"prompt_tokens={self.prompt_tokens:.1f}"]
        keys += [f"response_tokens={self.response_tokens:.1f}", f"acceptance={self.acceptance:.3f}", f"epochs={EPOCHS}"]
        keys += [f"max_new_tokens={MAX_NEW_TOKENS}", f"eval_prompts={eval_prompts}", f"live_prompts={LIVE}", "features=cached"]
        return [*keys, f"decodings={self.decodings}"]


@dataclass(frozen=True)
class Log:
    """What a command printed, and when, in seconds after its start."""

    lines: list[tuple[float, str]]
    end: float

    @classmethod
    def of(cls, folder: Path, *words: str) -> "Log":
        """Run a verb of specheads."""
        command = [sys.executable, "-m", "specheads", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        print(" ".join(["specheads", *words]), file=sys.stderr)
        start = time.perf_counter()
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as running:
            assert running.stdout is not None
            lines = [(time.perf_counter() - start, line.rstrip()) for line in running.stdout]
        if running.returncode:
            raise SystemExit("\n".join(line for _, line in lines[-20:]))
        return cls(lines, time.perf_counter() - start)

    def seconds(self, first: str, last: str | None) -> float:
        """Return the time from the first line with `first` to the next one with `last`, or to the end."""
        begin = next(when for when, line in self.lines if first in line)
        ends = [when for when, line in self.lines if last is not None and last in line and when > begin]
        return (ends[0] if ends else self.end) - begin


def run(folder: Path, prompts: int, eval_prompts: int) -> Run:
    """Run all commands in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tests = prompts // 10
    words = ["model=nano", f"data.num_train={prompts - 2 * tests}", f"data.num_dev={tests}", f"data.num_test={tests}"]
    words.append(f"data.max_new_tokens={MAX_NEW_TOKENS}")
    recorded = [f"num_prompts={eval_prompts // 2}", f"num_dev_prompts={eval_prompts // 2}", f"num_live_prompts={LIVE}"]
    logs = {
        "data": Log.of(folder, "data", *words),
        "train": Log.of(folder, "train", *words, f"trainer.max_epochs={EPOCHS}", "features=cached"),
        "evaluate": Log.of(folder, "evaluate", *words, "head=latest", *recorded),
    }
    seconds = {names: logs[verb].seconds(first, last) for names, (verb, first, last) in STAGES.items()}
    num_tokens, seconds["decoding",] = decoded(folder)
    prompt, response, acceptance = texts(folder)
    return Run(seconds, prompt, response, acceptance, round(num_tokens / (LIVE * response)))


def decoded(folder: Path) -> tuple[int, float]:
    """Return the number of tokens that an evaluation decoded live, and the seconds that this took."""
    (evaluation,) = (folder / "outputs" / "evaluate").iterdir()
    made = [evaluation / name for name in GENERATIONS if (evaluation / name).exists()]
    lines = [json.loads(line) for path in made for line in path.read_text().splitlines()]
    stats = [each for line in lines if "entry" in line for of_setting in line["entry"]["stats"] for each in of_setting]
    return sum(each["num_tokens"] for each in stats), sum(each["seconds"] for each in stats)


def texts(folder: Path) -> tuple[float, float, float]:
    """Return the mean numbers of tokens of prompts and responses, and the mean probability of acceptance."""
    columns = ["prompt_ids", "response_ids", "accept_prob"]
    tables = [pq.read_table(path, columns=columns) for path in folder.glob("data/*/*.parquet")]
    rows = [row for table in tables for row in table.to_pylist()]
    accepted = [value for row in rows for value in row["accept_prob"]]
    counts = [sum(len(row[name]) for row in rows) / len(rows) for name in columns[:2]]
    return counts[0], counts[1], sum(accepted) / len(accepted)


def planned_seconds(keys: list[str], with_overheads: bool) -> dict[str, float]:
    """Return what a plan says of each stage."""
    settings = PlanSettings(**{name: yaml.safe_load(value) for name, value in (key.split("=", 1) for key in keys)})
    pair, machine, _ = planned(settings)
    chosen = machine if with_overheads else replace(machine, overheads={})
    return {stage.name: stage.seconds for stage in plan(pair, chosen, settings)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measure", choices=PROMPTS)
    parser.add_argument("--prompts", type=int, help="of all splits; default: 400, or 1000 for stages")
    parser.add_argument("--eval-prompts", type=int, help="dev and test prompts that are recorded; default: 40, or 100 for stages")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "plan_check")
    parser.add_argument(
        "--result", metavar="NAME", help="keep it as benchmarks/results/NAME.json; default: plan_overheads, plan_stages"
    )
    given = parser.parse_args()
    prompts, eval_prompts = (given.prompts or PROMPTS[given.measure][0]), (given.eval_prompts or PROMPTS[given.measure][1])
    run(given.folder, 100, 10)
    made = run(given.folder, prompts, eval_prompts)
    keys = made.keys(prompts, eval_prompts)
    expected = planned_seconds(keys, given.measure == "stages")
    rows: list[list[Value]] = []
    for names, seconds in made.seconds.items():
        together = sum(expected[name] for name in names)
        if given.measure == "stages":
            rows.append([" and ".join(names), together, seconds, together / seconds])
        else:
            rows += [[name, expected[name], expected[name] * seconds / together, seconds / together] for name in names]
    planned_column, measured = Column("planned, s", "fixed:1"), Column("measured, s", "fixed:1")
    title = f"nano, {prompts:,} prompts, {eval_prompts} of them recorded, on this machine"
    if given.measure == "stages":
        columns = [Column("stage"), planned_column, measured, Column("planned over that", "fixed:2")]
    else:
        columns = [Column("stage"), Column("products and reads, s", "fixed:1"), measured, Column("over that", "fixed:2")]
    table = Table(given.measure, title, columns, rows)
    print(f"{table.title}\n\n{text_of(table)}")
    notes = f"specheads plan {' '.join(keys)}"
    write_result(given.result or f"plan_{given.measure}", [table], split="train, dev and test", seeds=[0], notes=notes)


if __name__ == "__main__":
    main()
