"""Check what papers claim by repeating an experiment.

    python -m benchmarks.papers block_table1 model=nano num_prompts=40
    python -m benchmarks.papers specdecpp_table1 model=nano head=latest
    python -m benchmarks.papers gsd_results model=nano split=final data.final_part=9 speeds=false

An experiment is a file of `experiments/`. It takes the keys of `specheads evaluate` that choose a
pair, prompts, heads and an engine, and `split=dev`, `ratio=`, `replay=`, `speeds=`, `methods=` and
`claims=`. Results are written below `outputs/papers/`; those in `claims/` make docs/results.md.
"""

import shlex
import sys
from collections import Counter
from pathlib import Path

from benchmarks.papers import reproduce
from specheads.errors import UserError
from specheads.storage.files import write_json


def main(words: list[str]) -> Path:
    """Run what the first word names; print the outcome of each claim, and return the file."""
    names = sorted(path.stem for path in reproduce.EXPERIMENTS.glob("*.yaml"))
    name = words[0] if words else ""
    if name not in names:
        raise UserError(f"{name!r} is no experiment; use {', '.join(names)}.")
    result = reproduce.run(name, words[1:])
    for claim in result["claims"]:
        print(f"{claim['outcome']}: {claim['says']} Here: {claim['ours']}. {claim['why']}")
    print(Counter(claim["outcome"] for claim in result["claims"]))
    path = Path("outputs/papers") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path, {"command": shlex.join(["python", "-m", "benchmarks.papers", *words])} | result
    )
    return path


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
