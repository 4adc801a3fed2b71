"""Does a plan predict what the stages take on this machine?

    python benchmarks/plan_check.py [--prompts 2000] [--eval-prompts 200]

Runs `specheads data`, `train` and `evaluate` on the embedded nano in an empty folder, twice: the first run, of few prompts,
compiles what the second one uses. Their stages are timed by what they log, and compared with `specheads plan gpu=cpu`, which is
given the lengths of the texts and the acceptance that were found.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_result_option, text_of, write_result

ROOT = Path(__file__).parents[1]
EPOCHS, LIVE, MAX_NEW_TOKENS = 12, 32, 128
STAGES = {  # by stage of a plan, or several of one command: the command, and parts of the lines that begin and end it
    ("responses", "labels"): ("data", "still to do, in", None),
    ("heads",): ("train", "features: at most", "calibrating"),
    ("recording",): ("evaluate", "recording: ", "predicting"),
    ("decoding",): ("evaluate", "costs: ", "report"),
}
PREPARED = "loaded ", "compiled "  # lines about what a plan leaves out, at the beginning of a stage


@dataclass
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
        """Return the time from a line with `first`, or about what was prepared then, to one with `last`, or to the end."""
        begin = next(when for when, line in self.lines if first in line)
        following = iter([(when, line) for when, line in self.lines if when > begin])
        while (step := next(following, None)) and not (last is not None and last in step[1]):
            begin = step[0] if any(sign in step[1] for sign in PREPARED) else begin
        ends = [when for when, line in self.lines if last is not None and last in line and when > begin]
        return (ends[0] if ends else self.end) - begin


def run(folder: Path, prompts: int, eval_prompts: int) -> dict[str, Log]:
    """Run all commands in an empty folder; return their logs by verb."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tests = prompts // 10
    words = ["model=nano", f"data.num_train={prompts - 2 * tests}", f"data.num_dev={tests}", f"data.num_test={tests}"]
    words.append(f"data.max_new_tokens={MAX_NEW_TOKENS}")
    recorded = [f"num_prompts={eval_prompts // 2}", f"num_dev_prompts={eval_prompts // 2}", f"num_live_prompts={LIVE}"]
    return {
        "data": Log.of(folder, "data", *words),
        "train": Log.of(folder, "train", *words, f"trainer.max_epochs={EPOCHS}", "features=cached"),
        "evaluate": Log.of(folder, "evaluate", *words, "head=latest", *recorded),
    }


def texts(folder: Path) -> tuple[float, float, float]:
    """Return the mean numbers of tokens of prompts and responses, and the mean probability of acceptance."""
    columns = ["prompt_ids", "response_ids", "accept_prob"]
    tables = [pq.read_table(path, columns=columns) for path in folder.glob("data/*/*.parquet")]
    rows = [row for table in tables for row in table.to_pylist()]
    accepted = [value for row in rows for value in row["accept_prob"]]
    counts = [sum(len(row[name]) for row in rows) / len(rows) for name in columns[:2]]
    return counts[0], counts[1], sum(accepted) / len(accepted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--eval-prompts", type=int, default=200, help="dev and test prompts that are recorded")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "plan_check")
    add_result_option(parser, "plan_check")
    given = parser.parse_args()
    run(given.folder, 200, 20)
    logs = run(given.folder, given.prompts, given.eval_prompts)
    prompt, response, acceptance = texts(given.folder)
    plan = ["gpu=cpu", "gpus=1", "model=nano", f"prompts={given.prompts}", f"prompt_tokens={prompt:.1f}"]
    plan += [f"response_tokens={response:.1f}", f"acceptance={acceptance:.3f}", f"max_new_tokens={MAX_NEW_TOKENS}"]
    plan += [f"epochs={EPOCHS}", f"eval_prompts={given.eval_prompts}", f"live_prompts={LIVE}", "features=cached"]
    Log.of(given.folder, "plan", *plan, "out=plan.json")
    stages = json.loads((given.folder / "plan.json").read_text())["stages"]
    predicted = {stage["name"]: stage["seconds"] for stage in stages}
    rows: list[list[Value]] = []
    for names, (verb, first, last) in STAGES.items():
        measured, planned = logs[verb].seconds(first, last), sum(predicted[name] for name in names)
        rows.append([" and ".join(names), planned, measured, planned / measured])
    columns = [Column("stage"), Column("planned, s", "fixed:1"), Column("measured, s", "fixed:1"), Column("planned over that")]
    table = Table("stages", f"nano, {given.prompts:,} prompts, on this machine", columns, rows)
    print(f"{table.title}\n\n{text_of(table)}")
    write_result(given.result, [table], split="train, dev and test", seeds=[0], notes=f"specheads plan {' '.join(plan)}")


if __name__ == "__main__":
    main()
