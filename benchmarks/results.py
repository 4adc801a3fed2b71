"""Keep what a script measured, as JSON in `benchmarks/results/`, with everything that is needed to measure it again.

    columns = [Column("rule"), Column("tokens/s", "fixed:0"), Column("over plain", "ratio:2")]
    write_result("decoding", [Table("greedy", "Greedy", columns, rows)], split="dev", seeds=[0])

Values are numbers, text, None or intervals; `benchmarks/render.py`, which makes every table of docs/measurements, formats them.
"""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import RESULTS, ROOT, cell, format_of, markdown
from specheads.prompts.prompt import ids_hash
from specheads.storage.files import write_json

Value = float | int | str | None | Mapping[str, float]
FINAL_PARTS = "final_parts.json"
OUTPUTS = ROOT / "outputs" / "benchmarks"
RENDERED = ("docs/measurements", "benchmarks/gpu/README.md", "benchmarks/results", f"benchmarks/{FINAL_PARTS}")


@dataclass(frozen=True)
class Column:
    """A column's heading and the format of its numbers: one of `render.FORMATS`, as `percent:1` (a share) or `ms:2` (seconds)."""

    name: str
    format: str | None = None


@dataclass(frozen=True)
class Table:
    """One table; a row has a value for each column."""

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]

    def __post_init__(self) -> None:
        for column in self.columns:
            format_of(column.format)
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.key!r}: a row has {len(row)} values for {len(self.columns)} columns: {row!r}")


@dataclass(frozen=True)
class Result:
    """What a command measured, when, where and on what."""

    name: str
    command: str  # one line that makes it again
    date: str
    commit: str | None  # of the code that ran, with "-dirty" after it if files differed
    machine: Mapping[str, Any]
    load: Mapping[str, Any] | None
    split: str | None  # which prompts: "dev", "test, read before", "final part 1"
    seeds: Sequence[int]
    prompts: Mapping[str, Any] | None  # a prompt_record, or several by the name of their set
    notes: Sequence[str]
    tables: Sequence[Table]


def text_of(table: Table) -> str:
    """Return a table as it is printed and shown in the documentation."""
    formats = [column.format for column in table.columns]
    rows = [[cell(value, form) for value, form in zip(row, formats, strict=True)] for row in table.rows]
    return "\n".join(markdown([column.name for column in table.columns], formats, rows))


def interval(value: float, low: float, high: float) -> dict[str, float]:
    """Return an estimate with the limits of its 95 % interval."""
    return {"value": float(value), "low": float(low), "high": float(high)}


def half_width(value: float, half: float) -> dict[str, float]:
    """Return an estimate with an interval of so much to both sides, for the format `plus_minus`."""
    return interval(value, value - half, value + half)


def prompt_record(prompt_ids: Iterable[str]) -> dict[str, Any]:
    """Return what tells whether two measurements had the same prompts; the hash is that of an evaluation's report.

    The Python version belongs to it: nano's prompts are functions of the standard library.
    """
    ids = list(prompt_ids)
    return {"hash": ids_hash(ids), "number": len(ids), "python": platform.python_version()}


def add_keep_option(parser: argparse.ArgumentParser, name: str) -> None:
    """Give a script the option that keeps its result with those of the repository."""
    described = f"keep the result as benchmarks/results/NAME.json (default: {name}); without this it goes to outputs/benchmarks/"
    parser.add_argument("--keep", nargs="?", const=name, metavar="NAME", help=described)


def write_result(
    name: str,
    tables: Sequence[Table],
    command: str | None = None,
    split: str | None = None,
    seeds: Sequence[int] = (),
    prompts: Mapping[str, Any] | None = None,
    notes: Sequence[str] | str = (),
    machine: Mapping[str, Any] | None = None,
    load: Mapping[str, Any] | None = None,
    final_parts: Sequence[int] = (),
    keep: str | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Write a result and return its file: in outputs/benchmarks, or in `folder` under the name `keep` where one is given.

    `command`: that of this process where none is given. `prompts`: from `prompt_record`, one or several by the name of their
    set. `machine` and `load`: only where another process measured. `final_parts`: those of the final split that were read;
    parts that were read before are printed, and a kept result is listed next to `folder`.
    """
    warn_of_spent(final_parts, folder)
    place, name = (folder, keep) if keep else (OUTPUTS, name)
    result = Result(
        name=name,
        command=without_folders(command or started_command()),
        date=datetime.now(UTC).date().isoformat(),
        commit=COMMIT,
        machine=dict(machine or this_machine()),
        load=load if machine else {"start": LOAD, "end": load_average(), "quiet": is_quiet()},
        split=split,
        seeds=list(seeds),
        prompts=prompts and dict(prompts),
        notes=[notes] if isinstance(notes, str) else list(notes),
        tables=list(tables),
    )
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{name}.json"
    write_json(path, asdict(result))
    if keep:
        list_spent(final_parts, result, folder)
        print(f"kept as benchmarks/results/{path.name}; `python benchmarks/render.py` puts it into the tables", file=sys.stderr)
    else:
        print(f"written to {path}; `--keep` puts it into benchmarks/results", file=sys.stderr)
    return path


def warn_of_spent(parts: Sequence[int], folder: Path = RESULTS) -> None:
    """Print which results have read these parts of the final split before."""
    for entry in spent_parts(folder):
        if entry["part"] in parts:
            commit = f", commit {entry['commit']}" if entry["commit"] else ""
            print(
                f"part {entry['part']} of the final split was read before, by {entry['by']} ({entry['date']}{commit})",
                file=sys.stderr,
            )


def list_spent(parts: Sequence[int], result: Result, folder: Path = RESULTS) -> None:
    """Add to the list of spent parts those that a result was not yet known to have read."""
    entries = spent_parts(folder)
    known = {(entry["part"], entry["by"]) for entry in entries}
    source = {"by": result.name, "command": result.command, "date": result.date, "commit": result.commit}
    new = [{"part": part, **source} for part in parts if (part, result.name) not in known]
    if new:
        write_json(folder.parent / FINAL_PARTS, [*entries, *new])


def spent_parts(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return what has read parts of the final split: by whom, by which command, when and at which commit."""
    path = folder.parent / FINAL_PARTS
    return json.loads(path.read_text()) if path.exists() else []


def started_command() -> str:
    """Return the command line that started this process, from the root of the repository."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name
    return f"python {shlex.join([shown, *sys.argv[1:]])}"


def without_folders(command: str) -> str:
    """Return a command without the folders of this machine: paths become relative to the repository, or keep only their name."""
    inside = command.replace(f"{ROOT}/", "")
    return re.sub(r"(?<![\w.<>-])/(?:[^\s/'\",:}]+/)*([^\s/'\",:}]+)", r"\1", inside)


def current_commit() -> str | None:
    """Return the commit of the files around this one, `-dirty` if others than results differ; None without git."""
    others = [f":!{name}" for name in RENDERED]
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no", "--", ".", *others) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def this_machine() -> dict[str, Any]:
    """Return the processor, what of it is used, the versions and the GPU."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def processor() -> str:
    """Return the processor's model."""
    information = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.+)$", information.read_text(), re.MULTILINE) if information.exists() else None
    return match[1] if match else platform.processor() or platform.machine()


def load_average() -> float:
    """Return the machine's load average over a minute."""
    return round(os.getloadavg()[0], 2)


def is_quiet(loops: int = 100) -> bool:
    """Return whether the machine does nothing else: on each core the same loop takes the same time, again and again."""
    if not hasattr(os, "sched_setaffinity"):
        return evenly_timed(spin_seconds(loops))
    cores = os.sched_getaffinity(0)
    try:
        for core in sorted(cores):
            os.sched_setaffinity(0, {core})
            if not evenly_timed(spin_seconds(loops)):
                return False
        return True
    finally:
        os.sched_setaffinity(0, cores)


def evenly_timed(seconds: Sequence[float]) -> bool:
    """Return whether the 95th percentile is within twice the median and the mean within 1.15 times it."""
    median, late = statistics.median(seconds), sorted(seconds)[int(0.95 * (len(seconds) - 1))]
    return late <= 2 * median and statistics.fmean(seconds) <= 1.15 * median


def spin_seconds(loops: int) -> list[float]:
    """Return the seconds of equal loops of about 2 ms, after ten that do not count."""
    taken = []
    for _ in range(loops + 10):
        start = time.perf_counter()
        for _ in range(50_000):
            pass
        taken.append(time.perf_counter() - start)
    return taken[10:]


# Of the start of the process: a long run loads the machine itself, and the repository may move on under it.
LOAD, COMMIT = load_average(), current_commit()
