"""Curves of training by one and by two processes, and of runs that another number of processes resumes.

    python benchmarks/processes.py [--only heads|drafts]

Every training is a command; two processes are started by torchrun on this machine, and talk by gloo. All learn from the same
batches (loader.batch_size is that of all processes), so that only the order of float32 sums differs. A run is resumed from the
first checkpoint that the other run wrote.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_result_option, text_of, write_result

ROOT = Path(__file__).parents[1]
SMALL = ["model=nano", "data.num_train=48", "data.num_dev=8", "data.num_test=8", "data.max_new_tokens=24", "loader.batch_size=10"]
SMALL += ["trainer.accelerator=cpu", "trainer.max_epochs=3", "trainer.log_every_n_steps=1", "checkpoint.every_steps=4"]
KINDS = {
    "heads": ["train", *SMALL, "calibration=null"],
    "drafts": ["distill", *SMALL, "validation={num_prompts: 8, live_prompts: 1, live_tokens: 8}"],
}
FSDP2 = "+trainer.strategy=fsdp2"


@dataclass(frozen=True)
class Trained:
    """The points of a finished run's curves, by step and figure, and a copy of its first checkpoint."""

    points: dict[tuple[int, str], float]
    checkpoint: Path


def trained(folder: Path, name: str, kind: str, processes: int, *words: str) -> Trained:
    """Train by a command in its own folder of outputs; the data are those of all runs."""
    command = ["-m", "specheads", *KINDS[kind], f"paths.outputs={name}", *words]
    if processes > 1:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    kept = folder / f"{name}.ckpt"
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            if not kept.exists() and (written := list((folder / name).glob("*/*/checkpoints/last.ckpt"))):
                shutil.copy(written[0], folder / "copy")  # a file that is renamed when it is complete
                (folder / "copy").rename(kept)
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit((folder / f"{name}.log").read_text())
    print(f"{name}: trained", file=sys.stderr)
    return Trained(curve(next((folder / name).glob("*/*/**/metrics.csv"))), kept)


def curve(path: Path) -> dict[tuple[int, str], float]:
    """Return the points of a run's curves; decoded prompts are left out: a draft that is spread over processes decodes none."""
    with path.open() as stream:
        rows = list(csv.DictReader(stream))
    names = [name for name in rows[0] if name not in ("step", "epoch") and "live" not in name and not name.startswith("test/")]
    return {(int(row["step"]), name): float(row[name]) for row in rows for name in names if row[name]}


def differences(run: Trained, expected: Trained, part: str) -> tuple[int, float, float]:
    """Return the number of points of a part of the curve, and the largest absolute and relative difference."""
    if run.points.keys() != expected.points.keys():
        raise SystemExit("the curves have other points")
    pairs = [(value, expected.points[key]) for key, value in run.points.items() if key[1].startswith(part)]
    return len(pairs), max(abs(a - b) for a, b in pairs), max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)


def runs_of(kind: str, folder: Path) -> tuple[Trained, dict[str, Trained]]:
    """Return the run of one process, and the others by what they are."""
    alone = trained(folder, f"{kind}-one", kind, 1)
    two = trained(folder, f"{kind}-two", kind, 2)
    others = {"two by torchrun, DDP": two}
    ways = {"DDP": two}
    if kind == "drafts":
        ways["FSDP2"] = others["two by torchrun, FSDP2"] = trained(folder, "drafts-fsdp2", kind, 2, FSDP2)
    for way, run in ways.items():
        words = [FSDP2] if way == "FSDP2" else []
        resumed = trained(folder, f"{kind}-{way}-to-one", kind, 1, f"resume={run.checkpoint.name}")
        others[f"one, resumed from two ({way})"] = resumed
        resumed = trained(folder, f"{kind}-one-to-{way}", kind, 2, f"resume={alone.checkpoint.name}", *words)
        others[f"two ({way}), resumed from one"] = resumed
    return alone, others


def main() -> None:
    """Train, compare the curves, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(KINDS), help="train these alone")
    parser.add_argument("--folder", type=Path, help="the folder for data and runs; default: a temporary one")
    add_result_option(parser, "none")
    given = parser.parse_args()
    rows: list[list[Value]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in [given.only] if given.only else list(KINDS):
            alone, others = runs_of(kind, folder)
            for name, run in others.items():
                for part in ("train", "dev"):
                    points, *largest = differences(run, alone, part)
                    rows.append([kind, name, part, points, *(f"{value:.1e}" for value in largest)])
    columns = [Column("training"), Column("processes"), Column("curve"), Column("points", "fixed:0")]
    columns += [Column("largest difference"), Column("relative")]
    table = Table("curves", "Differences from the curve of one process, with batches of the same rows", columns, rows)
    print(f"{table.title}\n\n{text_of(table)}")
    write_result(given.result, [table], split="train", seeds=[0])


if __name__ == "__main__":
    main()
