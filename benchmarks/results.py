"""Keep what a script measured, as JSON in `benchmarks/results/`, with everything that is needed to
measure it again.

    columns = [Column("rule"), Column("tokens/s", "fixed:0"), Column("over plain", "ratio:2")]
    write_result("decoding", [Table("greedy", "Greedy", columns, rows)], split="dev", seeds=[0])

Values are numbers, text, None or intervals; `benchmarks/render.py`, which makes every table of
docs/measurements, formats them.
"""

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import RESULTS, ROOT, Value, format_of, markdown
from specheads.load import NOTABLE, OthersLoad
from specheads.prompts.prompt import ids_hash
from specheads.storage.files import write_json

OUTPUTS = ROOT / "outputs" / "benchmarks"
MOST_LOAD = 0.5  # a quiet machine's average load over a minute is lower
RENDERED = (
    "docs/measurements",
    "benchmarks/gpu/README.md",
    "benchmarks/results",
    "benchmarks/final_parts.json",
)


@dataclass(frozen=True)
class Column:
    """A column's heading and the format of its numbers: one of `render.FORMATS`, as `percent:1` (a
    share) or `ms:2` (seconds).
    """

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
                raise ValueError(
                    f"table {self.key!r}: a row has {len(row)} values for {len(self.columns)}"
                    f" columns: {row!r}"
                )


def text_of(table: Table) -> str:
    """Return a table as Markdown, for printing and the documentation."""
    names = [column.name for column in table.columns]
    formats = [column.format for column in table.columns]
    return "\n".join(markdown(names, formats, table.rows))


def prompt_record(prompt_ids: Iterable[str]) -> dict[str, object]:
    """Return what tells whether two measurements had the same prompts.

    The hash is that of an evaluation's report.

    The Python version belongs to it: nano's prompts are functions of the standard library.
    """
    ids = list(prompt_ids)
    return {"hash": ids_hash(ids), "number": len(ids), "python": platform.python_version()}


def add_keep_option(parser: argparse.ArgumentParser, name: str) -> None:
    """Give a script the option that keeps its result with those of the repository."""
    described = f"write to benchmarks/results/NAME.json (default: {name}), not outputs/benchmarks/"
    parser.add_argument("--keep", nargs="?", const=name, metavar="NAME", help=described)


def write_result(
    name: str,
    tables: Sequence[Table],
    command: str | None = None,
    split: str | None = None,
    seeds: Sequence[int] = (),
    prompts: Mapping[str, object] | None = None,
    notes: Sequence[str] | str = (),
    keep: str | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Write a result and return its file: in outputs/benchmarks, or in `folder` under the name
    `keep` where one is given.

    `command`: that of this process where none is given. `prompts`: from `prompt_record`, one or
    several by the name of their set.
    """
    place, name = (folder, keep) if keep else (OUTPUTS, name)
    result = {
        "name": name,
        "command": _without_folders(command or _started_command()),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": COMMIT,
        "machine": _this_machine(),
        "load": {"start": LOAD, "end": _load_average(), "quiet": _is_quiet()},
        "split": split,
        "seeds": list(seeds),
        "prompts": prompts and dict(prompts),
        "notes": [notes] if isinstance(notes, str) else list(notes),
        "tables": [asdict(table) for table in tables],
    }
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{name}.json"
    write_json(path, result)
    then = "benchmarks/render.py renders it" if keep else "--keep puts it into benchmarks/results"
    print(f"written to {path}; {then}", file=sys.stderr)
    return path


def _started_command() -> str:
    """Return the command line that started this process, from the root of the repository."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name
    return f"python {shlex.join([shown, *sys.argv[1:]])}"


def _without_folders(command: str) -> str:
    """Return a command without the folders of this machine: paths become relative to the
    repository, or keep only their name.
    """
    inside = command.replace(f"{ROOT}/", "")
    return re.sub(r"(?<![\w.<>-])/(?:[^\s/'\",:}]+/)*([^\s/'\",:}]+)", r"\1", inside)


def _commit() -> str | None:
    """Return the commit of the files around this one, `-dirty` if others than results differ.

    None without git.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        kept_out = [f":!{name}" for name in RENDERED]
        others = git("status", "--porcelain", "--untracked-files=no", "--", ".", *kept_out)
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if others else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _this_machine() -> dict[str, object]:
    """Return the processor, what of it is used, the versions and the GPU."""
    information = Path("/proc/cpuinfo")
    model = (
        re.search(r"^model name\s*: (.+)$", information.read_text(), re.MULTILINE)
        if information.exists()
        else None
    )
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _load_average() -> float:
    """Return the machine's load average over a minute."""
    return round(os.getloadavg()[0], 2)


def _is_quiet() -> bool:
    """Return whether the machine did little at the start, and other processes do little now."""
    others = OthersLoad()
    time.sleep(0.5)
    return LOAD < MOST_LOAD and others.next() < NOTABLE


# Of the start of the process: a long run loads the machine itself, and the repository may move on
# under it.
LOAD = _load_average()
COMMIT = _commit()
