"""How long does it take from a clone to an answer? Install, `python train.py` and `specheads
evaluate`, one after another, each run in a new clone with empty caches.

    python -m benchmarks.first_answer [--runs 3] [--without-install] [--keep]

For processors with AVX2 alone: `ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2`. Next to each run
is what the machine does in a second: products of matrices, and reading memory.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.results import ROOT, Column, Table, Value, add_keep_option, text_of, write_result
from specheads.commands.plan import Rates

TRAIN = "train.py"
EVALUATE = "evaluate.py"
COLUMNS = [
    Column("instructions"),
    Column("run", "fixed:0"),
    Column("GFLOP/s", "fixed:0"),
    Column("GB/s", "fixed:0"),
    Column("install, s", "fixed:0"),
    Column("`python train.py`, s", "fixed:0"),
    Column("`python evaluate.py`, s", "fixed:0"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--without-install", action="store_true", help="run in this environment")
    add_keep_option(parser, "first_answer")
    given = parser.parse_args()
    rows = []
    for number in range(given.runs):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run_of(number + 1, Path(folder), not given.without_install))
        print(text_of(Table("times", "", COLUMNS, rows)), flush=True)
    table = Table("times", "From a clone to an answer", COLUMNS, rows)
    write_result("first_answer", [table], keep=given.keep)


def run_of(number: int, folder: Path, installs: bool) -> list[Value]:
    """Return a row of COLUMNS."""
    rates = Rates.measured(torch.device("cpu"), torch.float32)
    clone = folder / "project"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    python = Path(sys.executable)
    install = None
    if installs:
        subprocess.run([python, "-m", "venv", str(folder / "environment")], check=True)
        python = folder / "environment" / "bin" / "python"
        install = seconds_of(
            [python, "-m", "pip", "install", "-q", "-e", ".", "-c", "constraints.txt"], clone
        )
    return [
        torch.backends.cpu.get_cpu_capability(),
        number,
        rates.flops / 1e9,
        rates.bandwidth / 1e9,
        install,
        seconds_of([python, TRAIN], clone),
        seconds_of([python, EVALUATE], clone),
    ]


def seconds_of(command: list[str | Path], clone: Path) -> float:
    """Return the seconds of a command in a clone, whose caches are in it."""
    temporary = clone / "temporary"  # where the compiler keeps precompiled headers
    temporary.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(clone),
        "SPECHEADS_CACHE": str(clone / "cache"),
        "TMPDIR": str(temporary),
    }
    began = time.perf_counter()
    subprocess.run(command, check=True, cwd=clone, env=environment, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
