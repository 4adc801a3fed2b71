"""Run all scripts that have not been run by this code on this machine, and print the goals next to what was measured.

    python -m benchmarks.gpu [--out outputs/gpu] [--device cuda] [--tiny]
    python -m benchmarks.gpu --budget

Each script runs in a process of its own, for eight minutes at most. Its JSON is kept under a key of the code and the machine, so
that after a kill the next run does what is left. `--budget` measures nothing: it writes the arithmetic to
benchmarks/results/gpu_budget.json, and what is under `--out` of the GPU that was measured last.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import budget
from benchmarks.gpu.budget import Documents, tables
from benchmarks.gpu.goals import GOALS
from benchmarks.gpu.machine import description
from benchmarks.gpu.script import add_options
from benchmarks.render import RESULTS, ROOT
from benchmarks.results import text_of, write_result
from specheads.errors import UserError
from specheads.language_model import checked_device

SCRIPTS = ("probe", "build_pairs", "round", "training", "data")  # those of most goals first
SECONDS = 480  # of a script, which stops by itself a little earlier
CODE = ("specheads", "data_gen", "benchmarks")
VERSIONS = ("python", "torch", "transformers", "cuda", "cudnn", "gpu", "cpu")  # of a machine's description


def main(argv: Sequence[str] | None = None, results: Path = RESULTS) -> int:
    """Run what is left, or write the budget; return the exit code, 1 where a script is not complete."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu", help="folder for the scripts' JSON")
    parser.add_argument("--budget", action="store_true", help="write what steps should take, and what was measured, as a result")
    arguments = parser.parse_args(argv)
    try:
        device = torch.device(checked_device(arguments.device))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.budget:
        return write_budget(latest_of_gpus(arguments.out), results)
    folder = arguments.out / key_of(device, arguments.tiny)
    for name in SCRIPTS:
        if is_complete(folder / f"{name}.json"):
            print(f"{name}: complete in {folder}", file=sys.stderr)
        else:
            run(name, folder, str(device), arguments.tiny)
    documents = kept_documents(folder)
    print("\n\n".join(f"{table.title}\n\n{text_of(table)}" for table in tables(documents)))
    print("\n" + "\n".join(summary(documents)))
    return int(not all(is_complete(folder / f"{name}.json") for name in SCRIPTS))


def key_of(device: torch.device, tiny: bool) -> str:
    """Return the name of the folder for measurements by this code on this machine."""
    digest, machine = hashlib.sha256(), description(device)
    for path in sorted(path for place in CODE for path in (ROOT / place).rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        digest.update(f"{path.relative_to(ROOT)} ".encode() + path.read_bytes())
    digest.update(json.dumps([machine[name] for name in VERSIONS] + [str(device)]).encode())
    return f"{digest.hexdigest()[:16]}{'-tiny' if tiny else ''}"


def is_complete(path: Path) -> bool:
    """Return whether a script has measured all its parts."""
    return path.is_file() and json.loads(path.read_text())["complete"]


def run(name: str, folder: Path, device: str, tiny: bool) -> None:
    """Run a script, which keeps its JSON in `folder`; what it had measured stays there if it is killed."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--device", device, "--keep", str(folder / f"{name}.json")]
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command + ["--tiny"] * tiny, cwd=ROOT, stdout=subprocess.DEVNULL, check=False, timeout=SECONDS)
        print(f"{name}: {'complete' if done.returncode == 0 else f'exit code {done.returncode}'}", file=sys.stderr, flush=True)
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {SECONDS} seconds", file=sys.stderr, flush=True)


def kept_documents(folder: Path) -> dict[str, Any]:
    """Return what scripts have measured so far, by their names."""
    paths = {name: folder / f"{name}.json" for name in SCRIPTS}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}


def summary(documents: Documents) -> list[str]:
    """Return a line for each goal that was measured, and one for each part that failed."""
    reached = budget.measured_goals(documents)
    lines = [
        f"{'met' if GOALS[name].is_met(value) else 'NOT MET'}: {GOALS[name].text}: {value:.3f}, {GOALS[name].bound} "
        f"{GOALS[name].limit:.2f}"
        for name, value in reached.items()
    ]
    for name, document in documents.items():
        failed = {part: content["failed"] for part, content in document["parts"].items() if "failed" in content}
        lines += [f"FAILED: {name}, {part}: {reason}" for part, reason in failed.items()]
        if "stopped" in document:
            lines.append(f"STOPPED: {name} {document['stopped']}")
    return lines


def latest_of_gpus(out: Path) -> dict[str, Any]:
    """Return the documents that were measured on a GPU in `out`, of the folder that was written last; none if there is none."""
    measured: dict[str, Any] = {}
    for folder in sorted(out.glob("*"), key=lambda path: path.stat().st_mtime):
        documents = {} if folder.name.endswith("-tiny") else kept_documents(folder)
        if any(document["machine"]["gpu"] for document in documents.values()):
            measured = documents
    return measured


def write_budget(documents: Documents, results: Path) -> int:
    """Write the result that benchmarks/gpu/README.md shows; return the exit code."""
    machine = {"cpu": f"counted, from the data sheet of one {budget.GPU}"}
    if documents:
        machine = next(iter(documents.values()))["machine"]
    draft = budget.Sizes.of("llama2-7b")
    ratios = [budget.head_ratio(4096, draft, of_heads) for of_heads in (1.0, 2.0, budget.FLOAT32)]
    note = (
        "20 heads on a draft of the shape of Llama 2 7B: {:.2f} times the multiply-adds of a step of one; in time, at the peaks, "
        "{:.1f} times with the heads in TF32 and {:.1f} times in float32, in which they are trained.".format(*ratios)
    )
    command = "python -m benchmarks.gpu --budget"
    write_result("gpu_budget", tables(documents), command, notes=note, machine=machine, folder=results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
