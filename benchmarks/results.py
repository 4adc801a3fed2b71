"""Keep what a script measured, as JSON in `benchmarks/results/`, with everything that is needed to
measure it again.

    columns = [Column("rule"), Column("tokens/s", "fixed:0"), Column("over plain", "ratio:2")]
    write_result("decoding", [Table("greedy", "Greedy", columns, rows)], seeds=[0])

Values are numbers, text, None or intervals; `benchmarks/render.py`, which makes every table of
docs/measurements, formats them.
"""

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.render import RESULTS, ROOT, Value, markdown
from specheads.load import processor_name
from specheads.storage.files import write_json

OUTPUTS = ROOT / "outputs" / "benchmarks"


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


def text_of(table: Table) -> str:
    """Return a table as Markdown, for printing and the documentation."""
    names = [column.name for column in table.columns]
    formats = [column.format for column in table.columns]
    return "\n".join(markdown(names, formats, table.rows))


def add_keep_option(parser: argparse.ArgumentParser, name: str) -> None:
    """Give a script the option that keeps its result with those of the repository."""
    described = f"write to benchmarks/results/NAME.json (default: {name}), not outputs/benchmarks/"
    parser.add_argument("--keep", nargs="?", const=name, metavar="NAME", help=described)


def write_result(
    name: str,
    tables: Sequence[Table],
    keep: str | None = None,
    command: str | None = None,
    notes: Sequence[str] = (),
    **more: object,
) -> Path:
    """Write a result and return its file: in outputs/benchmarks, or in benchmarks/results under the
    name `keep` where one is given.

    `command`: that of this process where none is given. `more`: what else decides the figures, such
    as seeds and prompts.
    """
    folder = RESULTS if keep else OUTPUTS
    started = shlex.join(["python", *sys.argv]).replace(f"{ROOT}/", "")
    result = {
        "name": keep or name,
        "command": command or started,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": COMMIT,
        "machine": _this_machine(),
        "load": {"start": LOAD, "end": _load_average()},
        **more,
        "notes": list(notes),
        "tables": [asdict(table) for table in tables],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{keep or name}.json"
    write_json(path, result)
    print(f"written to {path}", file=sys.stderr)
    return path


def _commit() -> str:
    """Return the commit of the files around this one, `-dirty` if their code differs."""

    def git(*words: str) -> str:
        return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()

    changed = git("diff", "--name-only", "HEAD", "--", "*.py", "*.yaml", "*.cpp", "*.h")
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")


def _this_machine() -> dict[str, object]:
    """Return the processor, what of it is used, the versions and the GPU."""
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _load_average() -> float:
    """Return the machine's load average over a minute."""
    return round(os.getloadavg()[0], 2)


# Of the start of the process: a long run loads the machine itself, and the repository may move on
# under it.
LOAD = _load_average()
COMMIT = _commit()
