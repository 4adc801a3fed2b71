"""Several workers on one data set: how fast they are, and what is lost when they are killed.

    python benchmarks/workers.py speed [--repeats 3]
    python benchmarks/workers.py kills [--kills 20]

`speed`: tokens/s of one process with one and with two threads, of two processes with one thread each on one folder, and of Ray on
this machine with one and with two workers; from the first response's beginning to the end of the command. The ways take turns, a
figure is the median of the repeats. `kills`: SIGKILL at random moments of the work, to one of two processes that is not started
again, to one of two workers of Ray, and to a driver of Ray whose command is then repeated. The files of every run, byte for byte,
are compared with those of one process.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, text_of, write_result

ROOT = Path(__file__).parents[1]
DATA = ["-m", "data_gen", "model=nano", "data.num_train=448", "data.num_dev=32", "data.num_test=32", "data.max_new_tokens=64"]
DATA += ["generation.batch_size=32", "generation.rows_per_shard=32"]
RAY = ["runner=ray", "ray.num_workers=2"]
BEGINS, TAKEN = "still to do, in", "is taken over"  # in the log
KINDS = ("one of two processes", "one of two Ray workers", "the driver of Ray, started again")


@dataclass
class Running:
    """A command that makes the data set in a folder, and what it has printed."""

    process: subprocess.Popen
    lines: list[str] = field(default_factory=list)
    begun: float | None = None  # when its work began, by the clock of this process

    @classmethod
    def start(cls, folder: Path, *words: str, threads: int = 1) -> "Running":
        """Start a command."""
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
        environment |= {"SPECHEADS_ENGINE": "eager", "HF_HUB_OFFLINE": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen([sys.executable, *DATA, *words], cwd=folder, env=environment, start_new_session=True, **pipes)
        running = cls(process)
        threading.Thread(target=running.read, daemon=True).start()
        return running

    def read(self) -> None:
        """Read what the command prints, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if BEGINS in line and self.begun is None:
                self.begun = time.perf_counter()
            self.lines.append(line)

    def wait_for_work(self) -> None:
        """Wait until the first response is being made."""
        while self.begun is None:
            if self.process.poll() is not None:
                raise SystemExit("".join(self.lines[-20:]))
            time.sleep(0.02)

    def wait(self) -> None:
        """Wait for the end. Raises SystemExit if it failed."""
        if self.process.wait() != 0:
            raise SystemExit("".join(self.lines[-20:]))
        time.sleep(0.2)  # for the last lines


def content(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file of the data set."""
    (cache,) = (path for path in (folder / "data").iterdir() if path.is_dir())  # a killed driver of Ray leaves its sign
    return {path.name: path.read_bytes() for path in cache.iterdir()}


def num_tokens(folder: Path) -> int:
    """Return the number of tokens of all responses."""
    tables = [pq.read_table(path, columns=["response_ids"]) for path in folder.glob("data/*/*.parquet")]
    return sum(len(ids) for table in tables for ids in table["response_ids"].to_pylist())


def timed(folder: Path, processes: int, *words: str, threads: int = 1) -> float:
    """Return tokens per second of so many processes that make the data set in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    running = [Running.start(folder, *words, threads=threads) for _ in range(processes)]
    for each in running:
        each.wait()
    end = time.perf_counter() - 0.2 * processes
    return num_tokens(folder) / (end - min(each.begun for each in running if each.begun is not None))


def ray_workers() -> list[int]:
    """Return the numbers of the processes in which Ray's workers make data."""
    workers = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                text = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.startswith(b"ray::_worker"):
                workers.append(int(entry.name))
    return workers


def killed(kind: str, folder: Path, moment: float) -> list[str]:
    """Kill a process of a run `moment` seconds after its work began; return the log of what finished the data set."""
    shutil.rmtree(folder, ignore_errors=True)
    words = [] if kind == KINDS[0] else RAY
    running = [Running.start(folder, *words) for _ in range(2 if kind == KINDS[0] else 1)]
    for each in running:
        each.wait_for_work()
    time.sleep(moment)
    if kind == KINDS[1]:
        if workers := ray_workers():
            os.kill(random.choice(workers), signal.SIGKILL)
    else:
        running[0].process.kill()
        running[0].process.wait()
    if kind == KINDS[2]:
        running.append(Running.start(folder, *words))
    last = running[-1]
    last.wait()
    return last.lines


def speed_table(given: argparse.Namespace) -> Table:
    """Time all ways of making the data set in turn, and compare their files."""
    ways: dict[str, tuple[int, list[str], int]] = {
        "one process": (1, [], 1),
        "one process, two threads": (1, [], 2),
        "two processes": (2, [], 1),
        "Ray, one worker": (1, ["runner=ray", "ray.num_workers=1"], 1),
        "Ray, two workers": (1, RAY, 1),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    equal = dict.fromkeys(ways, True)
    whole: dict[str, bytes] = {}
    for _ in range(given.repeats):
        for name, (processes, words, threads) in ways.items():
            folder = given.folder / "speed"
            speeds[name].append(timed(folder, processes, *words, threads=threads))
            whole = whole or content(folder)
            equal[name] &= content(folder) == whole
            print(f"{name}: {speeds[name][-1]:.0f} tokens/s, {'equal' if equal[name] else 'OTHER'} files", file=sys.stderr)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    first = medians["one process"]
    rows: list[list[Value]] = [
        [name, value, value / first, "equal" if equal[name] else "others"] for name, value in medians.items()
    ]
    columns = [Column("workers"), Column("tokens/s", "fixed:0"), Column("over one process", "ratio"), Column("files")]
    return Table("speed", f"Making the same data set, with labels; median of {given.repeats}", columns, rows)


def kill_table(given: argparse.Namespace) -> Table:
    """Kill processes at random moments; return a table of what came of it."""
    generator = random.Random(given.seed)
    random.seed(given.seed)
    timed(given.folder / "whole", 1)
    whole = content(given.folder / "whole")
    begin = time.perf_counter()
    killed(KINDS[0], given.folder / "kills", 0.0)
    seconds = (time.perf_counter() - begin) / 2
    counts = {kind: [0, 0, 0] for kind in KINDS}
    for number in range(given.kills):
        kind, moment = KINDS[number % len(KINDS)], generator.uniform(0, seconds)
        lines = killed(kind, given.folder / "kills", moment)
        redone = sum(TAKEN in line for line in lines)
        same = content(given.folder / "kills") == whole
        print(f"{kind}, after {moment:.1f} s: {redone} shards begun again, {'equal' if same else 'OTHER'} files", file=sys.stderr)
        counts[kind] = [total + more for total, more in zip(counts[kind], (1, redone, not same), strict=True)]
    columns = [Column("killed"), Column("times", "fixed:0"), Column("shards begun again", "fixed:0")]
    columns.append(Column("data sets that differ", "fixed:0"))
    return Table("kills", "SIGKILL at random moments of the work", columns, [[kind, *values] for kind, values in counts.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measure", choices=["speed", "kills"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "workers")
    parser.add_argument(
        "--result", metavar="NAME", help="keep it as benchmarks/results/NAME.json; default: workers_speed or workers_kills"
    )
    given = parser.parse_args()
    table = speed_table(given) if given.measure == "speed" else kill_table(given)
    print(f"{table.title}\n\n{text_of(table)}")
    write_result(given.result or f"workers_{given.measure}", [table], split="train", seeds=[given.seed])


if __name__ == "__main__":
    main()
