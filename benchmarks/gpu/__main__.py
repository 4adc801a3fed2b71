"""What decoding and training cost on a GPU, next to the goals.

    python -m benchmarks.gpu [round data training] [--device cuda] [--tiny] [--keep]

Each script runs in a process of its own, for eight minutes at most, and what it measured stays in outputs/gpu, so that a script
which fails or is killed loses no other. With `--tiny` models take seconds, only to see that the scripts work.
"""

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.machine import Setup
from benchmarks.render import ROOT
from benchmarks.results import Column, Table, add_keep_option, text_of, write_result
from specheads.pair.config import checked_device
from specheads.storage.files import write_json

SCRIPTS = {"round": ("decoding", "round_tables"), "training": ("training", "tables"), "data": ("decoding", "data_tables")}
SECONDS = 480  # of a script
OUTPUTS = ROOT / "outputs" / "gpu"
GOALS = {  # by name what it says, whether the limit is the least or the most, and the limit
    "target_alone": ("the target alone, of the memory's bandwidth (8B, bfloat16)", "at least", 0.70),
    "verification_of_8": ("a verification of 8 tokens, in steps of the target alone", "at most", 1.05),
    "round": ("a round, in its steps alone", "at most", 1.15),
    "twenty_heads": ("a training step of 20 heads, in steps of one head", "at most", 1.25),
    "distillation": ("distillation of 1B from 8B, of the peak of bfloat16 operations", "at least", 0.40),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scripts and print their tables with the goals; return 1 where a script did not end, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"default: {' '.join(SCRIPTS)}")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--tiny", action="store_true", help="use models that take seconds")
    parser.add_argument("--file", type=Path, help="measure in this process, and write the tables there as JSON")
    add_keep_option(parser, "gpu")
    given = parser.parse_args(argv)
    setup = Setup(torch.device(checked_device(given.device)), given.tiny)
    if given.file:
        (name,) = given.scripts
        measure(name, setup, given.file)
        return 0
    failed, documents = [], dict[str, Any]()
    for name in given.scripts or SCRIPTS:
        path = OUTPUTS / f"{name}.json"
        path.unlink(missing_ok=True)
        if not started(name, setup, path):
            failed.append(name)
        if path.is_file():
            documents[name] = json.loads(path.read_text())
    tables = tables_of(documents)
    for table in tables:
        print(f"\n{table.title}\n\n{text_of(table)}")
    print("".join(f"\nFAILED: {name}" for name in failed))
    write_result("gpu", tables, seeds=[0], notes="Random weights.", machine=setup.description(), keep=given.keep)
    return int(bool(failed))


def measure(name: str, setup: Setup, path: Path) -> None:
    """Run a script and write its tables and what it reached of the goals, after each table."""
    torch.manual_seed(0)
    goals: dict[str, float] = {}
    document: dict[str, Any] = {"goals": goals, "tables": []}
    module, tables = SCRIPTS[name]
    for table in getattr(importlib.import_module(f"benchmarks.gpu.{module}"), tables)(setup, goals):
        document["tables"].append(asdict(table))
        write_json(path, document)


def started(name: str, setup: Setup, path: Path) -> bool:
    """Run a script in a process of its own and return whether it ended well; what it had measured stays if it is killed."""
    command = [sys.executable, "-m", "benchmarks.gpu", name, "--device", str(setup.device), "--file", str(path)]
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        return not subprocess.run(command + ["--tiny"] * setup.tiny, cwd=ROOT, check=False, timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {SECONDS} seconds", file=sys.stderr, flush=True)
        return False


def tables_of(documents: Mapping[str, Any]) -> list[Table]:
    """Return the goals with what was reached of them, and all tables."""
    reached = {name: value for document in documents.values() for name, value in document["goals"].items()}
    columns = [Column("goal"), Column("limit is"), Column("limit", "fixed:2"), Column("measured", "fixed:2")]
    rows = [[*goal, reached.get(name)] for name, goal in GOALS.items()]
    made = [each for document in documents.values() for each in document["tables"]]
    others = [Table(**each | {"columns": [Column(**column) for column in each["columns"]]}) for each in made]
    return [Table("goals", "The goals, as ratios", columns, rows), *others]


if __name__ == "__main__":
    raise SystemExit(main())
