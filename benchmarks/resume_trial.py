"""`python benchmarks/resume_trial.py`: kill every command that writes at random times, start it again, and compare what it wrote
with what an undisturbed run writes.

Each trial runs one command in a folder of its own, kills it with SIGKILL at a time drawn uniformly from its work, and runs the
same command again. `--signal TERM` or INT asks the command to end instead of killing it. Two undisturbed runs are compared first:
what differs between them depends on time and is left out, all other values of all files must be the same. Trials that `--folder`
has already are not repeated.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.folder_values import differences, repeatable, values_of
from benchmarks.results import Column, Table, add_result_option, text_of, write_result

ROOT = Path(__file__).parents[1]
PAIR = ["model=nano", "data=nano", "data.max_new_tokens=16"]
SPLITS = ["data.num_train=32", "data.num_dev=8", "data.num_test=8"]
SHARDS = ["generation.batch_size=8", "generation.rows_per_shard=8"]
RECORDED = ["num_prompts=8", "num_samples=2"]
REPLAYED = ["num_prompts=8", "num_dev_prompts=8", "stopping=[fixed_length,head_threshold]", "fixed_lengths=[1,2,4]"]
TRAINED = ["checkpoint.every_steps=3", "trainer.log_every_n_steps=1", "loader.batch_size=8"]
VALIDATED = "validation={num_prompts: 4, live_prompts: 1, live_tokens: 8}"
DECODED = ["verification=block", "fixed_lengths=[1,2,4]", "thresholds=[0.5]", "num_live_prompts=6"]


@dataclass(frozen=True)
class Trial:
    """A command line, and the folders that it needs from a run of `train`.

    `timed` tells which values depend on measured times, though two runs may have the same ones.
    """

    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    timed: re.Pattern = re.compile("^$")


HEAD = ("data", "outputs")
TRIALS = {
    "data": Trial(("data", *PAIR, *SPLITS, *SHARDS)),
    "train": Trial(("train", *PAIR, *SPLITS, *SHARDS, *TRAINED, "trainer.max_epochs=4", "calibration.num_prompts=8"), ("data",)),
    "distill": Trial(
        ("distill", *PAIR, *SPLITS, *SHARDS, *TRAINED, "samples=mixed", "refresh_every=4", "trainer.max_epochs=1", VALIDATED),
        ("data",),
    ),
    "evaluate": Trial(("evaluate", *PAIR, *SPLITS, *SHARDS, *REPLAYED, "thresholds=[0.3,0.6]", "live=none"), HEAD),
    "evaluate, decoded": Trial(("evaluate", *PAIR, *SPLITS, *SHARDS, *DECODED), HEAD),
    "probe": Trial(
        ("probe", *PAIR, *SPLITS, *RECORDED, "num_live_prompts=2", "repeats=2", "widths=[8]", "generation.batch_size=4"),
        timed=re.compile(r"probe\.html |probe\.json 0\.(answer|options)\."),  # of measured step times
    ),
    "profile": Trial(("profile", *PAIR, *SPLITS, *RECORDED, "head=latest"), HEAD),
    "load": Trial(("load", *PAIR, *SPLITS, "num_prompts=8", "num_dev_prompts=8", "concurrencies=[1,4]", "num_seeds=2"), HEAD),
    "learning_curve": Trial(
        (
            "learning_curve",
            *PAIR,
            *SPLITS,
            *SHARDS,
            *TRAINED,
            *REPLAYED,
            "trainer.max_epochs=2",
            "thresholds=[0.5]",
            "shares=[0.5,1]",
        ),
        ("data",),
    ),
    "layer_search": Trial(("layer_search", *PAIR, *SPLITS, "num_dev_prompts=3")),
    "reproduce": Trial(("reproduce", "experiment=block_table1", *PAIR, *SPLITS, "num_prompts=8", "speeds=false")),
}


def main(argv: list[str] | None = None) -> int:
    """Run the trials and print the table; return 1 if anything differed, else 0."""
    parser = argparse.ArgumentParser(prog="benchmarks/resume_trial.py", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=4, help="trials of each command")
    parser.add_argument("--commands", nargs="*", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--signal", choices=["KILL", "TERM", "INT"], default="KILL")
    parser.add_argument("--seed", type=int, default=0, help="of the times at which commands are killed")
    parser.add_argument("--differences", type=int, default=5, help="differences of each trial that are shown")
    add_result_option(parser, "kills")
    parser.add_argument("--folder", type=Path, default=Path("outputs/resume_trial"))
    arguments = parser.parse_args(argv)
    folder = arguments.folder.absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command goes on"))
    prepare(folder)
    for command in arguments.commands:
        trials(command, folder, arguments)
    rows = rows_of(folder)
    columns = [Column("command"), Column("work, seconds", "fixed:0"), Column("compared values"), Column("kills")]
    columns += [
        Column("first kill after seconds", "fixed:1"),
        Column("last kill after seconds", "fixed:1"),
        Column("differences"),
    ]
    title = f"Killed by SIG{arguments.signal} at random moments, and started again"
    listed = [rows[command] for command in TRIALS if command in rows]
    table = Table("trials", title, columns, [*listed, total(listed)])
    print(f"\n{table.title}\n\n{text_of(table)}")
    write_result(arguments.result, [table], seeds=[arguments.seed])
    return int(any(row[-1] for row in rows.values()))


def rows_of(folder: Path) -> dict[str, list]:
    """Return the rows of the table so far, by command."""
    notes = {command: folder / f"{command}.json" for command in TRIALS}
    known = {command: json.loads(note.read_text()) for command, note in notes.items() if note.is_file()}
    return {
        command: [
            f"`specheads {command}`",
            note["seconds"],
            note["compared"],
            len(moments),
            min(moments),
            max(moments),
            note["differences"],
        ]
        for command, note in known.items()
        if (moments := note["moments"])
    }


def total(rows: list[list]) -> list:
    """Return the last row of the table."""
    columns = list(zip(*rows, strict=True))
    return ["all", None, sum(columns[2]), sum(columns[3]), min(columns[4]), max(columns[5]), sum(columns[6])]


def prepare(folder: Path) -> None:
    """Make the data set and the head that other commands need, if they are not there yet."""
    prepared = folder / "prepared"
    if not list(prepared.glob("outputs/head/*/heads/*/config.json")):
        shutil.rmtree(prepared, ignore_errors=True)
        undisturbed(Trial(TRIALS["train"].words), prepared, prepared)


def trials(command: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Run the trials of one command that are left, and keep its row of the table after each."""
    trial, prepared, place = TRIALS[command], folder / "prepared", folder / command.replace(", ", "_")
    note = folder / f"{command}.json"
    known = json.loads(note.read_text()) if note.is_file() else {"moments": [], "differences": 0}
    if "seconds" not in known:
        shutil.rmtree(place, ignore_errors=True)
        known["seconds"] = min(undisturbed(trial, place / name, prepared) for name in ("whole", "again"))
        note.write_text(json.dumps(known))
    whole = values_of(place / "whole")
    compared = {name for name in repeatable(whole, values_of(place / "again")) if not trial.timed.search(name)}
    print(f"{command:<18}{known['seconds']:>10.1f} s, {len(compared)} of {len(whole)} values do not depend on time", flush=True)
    generator = random.Random(f"{arguments.seed} {command} {len(known['moments'])}")
    for number in range(len(known["moments"]) + 1, arguments.kills + 1):
        code = 0
        while code == 0:  # it ended before the signal, so the trial is repeated with another time
            shutil.rmtree(place / str(number), ignore_errors=True)
            moment = generator.uniform(0, known["seconds"])
            code = killed(trial, place / str(number), prepared, moment, getattr(signal, f"SIG{arguments.signal}"))
        undisturbed(trial, place / str(number), prepared)
        differing = differences(values_of(place / str(number)), whole, compared)
        known["moments"].append(moment)
        known["differences"] += len(differing)
        known["compared"] = len(compared)
        note.write_text(json.dumps(known))
        print(f"{command:<18}{number:>6}{moment:>10.1f} s  exit code {code}, {len(differing)} differences", flush=True)
        print("".join(f"    {name}\n" for name in differing[: arguments.differences]), end="", flush=True)


@contextlib.contextmanager
def started(trial: Trial, folder: Path, prepared: Path) -> Iterator[subprocess.Popen]:
    """Start a command in `folder`, with a copy of what it needs; it does not survive the block."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in trial.needs:
        if not (folder / part).exists():
            shutil.copytree(prepared / part, folder / part)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    environment |= {"SPECHEADS_ENGINE": "eager", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "specheads", *trial.words]
    with (folder / "said.log").open("a") as said:
        process = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True, stdout=said, stderr=said)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def files_of(folder: Path) -> set[Path]:
    """Return the files that a command writes into."""
    return {path for part in HEAD for path in (folder / part).rglob("*")}


def wait_for_work(process: subprocess.Popen, folder: Path, before: set[Path]) -> None:
    """Wait until a command has written a file: a kill during the imports before that would test nothing."""
    while process.poll() is None and files_of(folder) <= before:
        time.sleep(0.02)


def undisturbed(trial: Trial, folder: Path, prepared: Path) -> float:
    """Run a command to its end and return the seconds that its work took."""
    with started(trial, folder, prepared) as process:
        wait_for_work(process, folder, files_of(folder))
        begin = time.perf_counter()
        code = process.wait()
    if code != 0:
        raise SystemExit(f"specheads {' '.join(trial.words)} failed in {folder}:\n{(folder / 'said.log').read_text()[-3000:]}")
    return time.perf_counter() - begin


def killed(trial: Trial, folder: Path, prepared: Path, moment: float, number: int) -> int:
    """Start a command, send the signal `moment` seconds after its work began, and return its exit code."""
    with started(trial, folder, prepared) as process:
        wait_for_work(process, folder, files_of(folder))
        time.sleep(moment)
        if process.poll() is None:
            os.killpg(process.pid, number)
        return process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
