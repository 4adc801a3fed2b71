"""`specheads runs`: the runs in a folder of outputs, with what each was asked for and its key
figures.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from specheads.commands.verbs import arguments
from specheads.errors import UserError
from specheads.storage.files import read_json
from specheads.storage.runs import STATE, read_state
from specheads.table import Table, print_table

_METRICS = {"kl": "KL", "auroc": "AUROC"}  # of a head, on held-out prompts


def main() -> None:
    """List the runs in the folder that this process's command line names.

    Raises UserError for one without runs.
    """
    value = arguments("runs", sys.argv[1:], ["outputs"]).get("outputs", "outputs")
    found = sorted(
        Path(value).glob(f"*/*/{STATE}"), key=lambda path: (path.parts[-3], path.parts[-2])
    )
    if not found:
        raise UserError(
            f"outputs={value} has no runs; give the folder that paths.outputs= named (by default"
            " outputs)."
        )
    print_runs([job for path in found for job in jobs_of(path.parent) or [path.parent]])


def jobs_of(folder: Path) -> list[Path]:
    """Return the folders of the jobs of a multirun, in their order; none for another run."""
    return sorted(
        (path.parent for path in folder.glob(f"[0-9]*/{STATE}")), key=lambda path: int(path.name)
    )


def print_runs(folders: Sequence[Path]) -> None:
    """Print a row for each run and each of its heads."""
    asked = {folder: _overrides(folder) for folder in folders}
    common = set.intersection(*map(set, asked.values())) if len(asked) > 1 else set()
    rows = []
    for folder in folders:
        state = "" if read_state(folder).get("finished") else "unfinished"
        what = " ".join(word for word in asked[folder] if word not in common)
        rows += [
            [str(folder / name), text or state, what]
            for name, text in list(_figures(folder)) or [("", "")]
        ]
    print_table(Table.of_texts(["run", "figures", "asked for"], rows, numbers=False))


def _overrides(folder: Path) -> list[str]:
    with contextlib.suppress(OSError, yaml.YAMLError):
        words = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text("utf-8")) or []
        return [word for word in words if not word.startswith(("paths.", "hydra."))]
    return []


def _figures(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the heads of a run, or what it recommends, with the key figures.

    Nothing of damaged files.
    """
    for path in sorted(folder.glob("heads/*/config.json")):
        test = _read(path).get("train", {}).get("test") or {}
        known = [f"{title} {test[key]:.3f}" for key, title in _METRICS.items() if key in test]
        yield f"heads/{path.parent.name}", ", ".join(known)
    speeds = {}
    for row in _read(folder / "report.json").get("live", []):
        if row["speedup"]:
            speeds[row["name"]] = row["speedup"]["value"]
    if speeds:
        best = max(speeds, key=speeds.__getitem__)
        yield "", f"fastest: {best}, {speeds[best]:.2f} times the target alone"
    for path in folder.glob("*/distill.json"):
        after = _read(path)["test"]["after"]
        yield path.parent.name, ", ".join(f"{name} {value:.3f}" for name, value in after.items())


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return read_json(path)
    return {}
