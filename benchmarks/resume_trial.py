"""`python benchmarks/resume_trial.py`: kill data_gen and train.py (both tasks) at random times, start them again, and compare
the results with those of an uninterrupted run.

Each trial runs one command in an empty folder, kills it with SIGKILL at a time drawn uniformly from its working time, and
repeats the command until it ends. `--signal TERM` or INT asks the command to end instead of killing it. Compared are every shard
and the manifest of the data, byte for byte, and every point of the curves, the tensors of the head or the draft and the test
metrics of training, exactly. On 2 cores it takes about half an hour.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, add_result_option, text_of, write_result
from specheads.storage.shards import read_manifest

ROOT = Path(__file__).parents[1]
SMALL = ["model=nano", "data.num_train=256", "data.num_dev=32", "data.num_test=32", "data.max_new_tokens=48"]
COMMANDS = {
    "data_gen": ["-m", "data_gen", *SMALL, "generation.batch_size=16", "generation.rows_per_shard=32"],
    "train.py": [
        str(ROOT / "train.py"),
        *SMALL,
        "trainer.max_epochs=12",
        "checkpoint.every_steps=5",
        "trainer.log_every_n_steps=1",
    ],
    "distill": [
        str(ROOT / "train.py"),
        "task=distill",
        *SMALL,
        "samples=mixed",
        "trainer.max_epochs=2",
        "checkpoint.every_steps=3",
        "trainer.log_every_n_steps=1",
        "refresh_every=5",
    ],
}
SHOWN = {
    "data_gen": "specheads data",
    "train.py": "specheads train",
    "distill": "specheads distill samples=mixed",
}
# What a command prints when its work begins; a kill during the imports before that would test nothing.
WORK_BEGINS = {"data_gen": "still to do, in", "train.py": "training ", "distill": "distilling "}


def main(argv: list[str] | None = None) -> int:
    """Run the trials and print the table; return 1 if anything differed, else 0."""
    parser = argparse.ArgumentParser(prog="benchmarks/resume_trial.py", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="trials of each command")
    parser.add_argument("--commands", nargs="*", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--signal", choices=["KILL", "TERM", "INT"], default="KILL")
    parser.add_argument("--seed", type=int, default=0, help="of the times at which commands are killed")
    add_result_option(parser, "resume_trial")
    parser.add_argument("--folder", type=Path, default=Path("outputs/resume_trial"))
    arguments = parser.parse_args(argv)
    generator = random.Random(arguments.seed)
    print(f"{'command':<10}{'trial':>6}{'killed after':>14}{'exit code':>11}  {'state at the kill':<44}{'differences':>11}")
    total, rows = 0, []
    for command in arguments.commands:
        folder = arguments.folder.absolute() / command.removesuffix(".py")
        shutil.rmtree(folder, ignore_errors=True)
        whole = folder / "whole"
        data = folder.parent / "data_gen" / "whole" / "data"
        if command != "data_gen" and not data.exists():
            uninterrupted("data_gen", data.parent, data)
        seconds = uninterrupted(command, whole, data)
        print(f"{command:<10}{'whole':>6}{seconds:>12.1f} s{'0':>11}  {progress(command, whole):<44}", flush=True)
        moments, differences = [], 0
        for trial in range(1, arguments.kills + 1):
            place = folder / str(trial)
            code = 0
            while code == 0:  # it ended before the signal, so the trial is repeated with another time
                shutil.rmtree(place, ignore_errors=True)
                moment = generator.uniform(0, seconds)
                code = killed(command, place, data, moment, getattr(signal, f"SIG{arguments.signal}"))
            state = progress(command, place)
            uninterrupted(command, place, data)
            count = len(compare(command, whole, place))
            moments.append(moment)
            differences += count
            print(f"{command:<10}{trial:>6}{moment:>12.1f} s{code:>11}  {state:<44}{count:>11}", flush=True)
        total += differences
        rows.append(
            [f"`{SHOWN[command]}`", seconds, arguments.kills, min(moments, default=None), max(moments, default=None), differences]
        )
    columns = [
        Column("command"),
        Column("work, seconds", "fixed:0"),
        Column("kills"),
        Column("first kill after seconds", "fixed:1"),
    ]
    columns += [Column("last kill after seconds", "fixed:1"), Column("differences")]
    table = Table("trials", f"Killed by SIG{arguments.signal} at random moments, and started again", columns, rows)
    print(f"\n{table.title}\n\n{text_of(table)}")
    write_result(arguments.result, [table], seeds=[arguments.seed])
    return int(total > 0)


def start(command: str, folder: Path, data: Path) -> subprocess.Popen:
    """Start a command in `folder`, with a copy of the data if it trains."""
    folder.mkdir(parents=True, exist_ok=True)
    if command != "data_gen" and not (folder / "data").exists():
        shutil.copytree(data, folder / "data")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
    }
    command_line = [sys.executable, *COMMANDS[command]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command_line, cwd=folder, env=environment, start_new_session=True, **pipes)


def wait_for_work(process: subprocess.Popen, command: str) -> list[str]:
    """Read the output until the work begins."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if WORK_BEGINS[command] in line:
            break
    return lines


def uninterrupted(command: str, folder: Path, data: Path) -> float:
    """Run a command to its end and return the seconds that its work took."""
    process = start(command, folder, data)
    lines = wait_for_work(process, command)
    begin = time.perf_counter()
    lines += process.stdout.readlines()
    if process.wait() != 0:
        raise SystemExit(f"{command} failed in {folder}:\n{''.join(lines[-20:])}")
    return time.perf_counter() - begin


def killed(command: str, folder: Path, data: Path, moment: float, number: int) -> int:
    """Start a command, send the signal `moment` seconds after its work began, and return its exit code."""
    process = start(command, folder, data)
    wait_for_work(process, command)
    time.sleep(moment)
    if process.poll() is None:
        os.killpg(process.pid, number)
    process.communicate()
    return process.returncode


def progress(command: str, folder: Path) -> str:
    """Return a description of what a folder holds so far."""
    if command == "data_gen":
        manifests = list(folder.glob("data/*/manifest.json"))
        shards = [read_manifest(path.parent)["shards"] for path in manifests]
        unfinished = len(list(folder.glob("data/*/.*.tmp")))
        return f"{sum(map(len, shards))} shards, {unfinished} unfinished files"
    curves = list(folder.glob("outputs/*/*/csv/metrics.csv"))
    points = sum(len(path.read_text().splitlines()) - 1 for path in curves)
    done = len([*folder.glob("outputs/head/*/heads/*/config.json"), *folder.glob("outputs/distill/*/draft/config.json")])
    return f"{len(list(folder.glob('outputs/*/*/checkpoints/last.ckpt')))} checkpoint, {points} points, {done} exported"


def compare(command: str, whole: Path, place: Path) -> list[str]:
    """Return what differs between two finished folders."""
    read: Callable[[Path], dict] = data_content if command == "data_gen" else training_content
    ours, theirs = read(whole), read(place)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def data_content(folder: Path) -> dict:
    """Return the bytes of every file of the data cache."""
    files = [path for path in folder.glob("data/*/*") if path.is_file() and path.name != ".lock"]
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files}


def training_content(folder: Path) -> dict:
    """Return the points, tensors, test metrics and number of runs of training."""
    runs = sorted(path.parent for path in folder.glob("outputs/*/*/checkpoints"))
    content = {"runs": len(runs)}
    for run in runs:
        for number, line in enumerate((run / "csv" / "metrics.csv").read_text().splitlines()):
            content[f"point {number}"] = line
        if (run / "test.json").exists():
            content["test"] = (run / "test.json").read_text()
        else:
            content["test"] = json.loads((run / "draft" / "distill.json").read_text())["test"]
        for path in [*run.glob("heads/*/*.safetensors"), *run.glob("draft/*.safetensors")]:
            for name, tensor in load_file(path).items():
                content[f"{path.parent.name}/{path.name} {name}"] = tensor.numpy().tobytes()
    return content


if __name__ == "__main__":
    raise SystemExit(main())
