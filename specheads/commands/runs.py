"""`specheads runs`: the runs in a folder of outputs, with what each was asked for and its key
figures.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml

from specheads.commands.verbs import arguments
from specheads.errors import UserError
from specheads.storage.files import read_json, without_home
from specheads.storage.runs import STATE, read_state

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
    jobs = [path.parent for path in folder.glob(f"[0-9]*/{STATE}")]
    jobs = [path for path in jobs if path.name.isdecimal()]  # not copies that a user made
    return sorted(jobs, key=lambda path: int(path.name))


def print_runs(folders: Sequence[Path]) -> None:
    """Print each run and each of its heads: its path, which is never broken, and below it its key
    figures and what it was asked for.
    """
    asked = {folder: _overrides(folder) for folder in folders}
    common = set.intersection(*map(set, asked.values())) if len(asked) > 1 else set()
    print(f"{len(folders)} runs; paths are relative to {without_home(str(Path.cwd()))}")
    for folder in folders:
        state = "" if read_state(folder).get("finished") else "unfinished"
        what = " ".join(word for word in asked[folder] if word not in common)
        for name, text in list(_figures(folder)) or [("", "")]:
            print(os.path.relpath(folder / name))
            about = "; ".join(filter(None, (text or state, what)))
            if about:
                width = shutil.get_terminal_size().columns
                print(fill(about, width, initial_indent="  ", subsequent_indent="  "))


def _overrides(folder: Path) -> list[str]:
    with contextlib.suppress(OSError, yaml.YAMLError):
        words = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text("utf-8"))
        words = list(map(str, words)) if isinstance(words, list) else []
        return [word for word in words if not word.startswith(("paths.", "hydra."))]
    return []


def _figures(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the heads of a run, or what it recommends, with the key figures.

    Nothing of damaged files.
    """
    for path in sorted(folder.glob("heads/*/config.json")):
        yield f"heads/{path.parent.name}", _read(_of_head, path)
    if recommended := _read(_of_report, folder / "report.json"):
        yield "", recommended
    for path in sorted(folder.glob("*/distill.json")):
        yield path.parent.name, _read(_of_draft, path)


def _read(tell: Callable[[Any], str], path: Path) -> str:
    """Return what `tell` reads in a JSON file; empty where the file has another form."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        return tell(read_json(path))
    return ""


def _of_head(config: Any) -> str:
    test = config["train"]["test"]
    return ", ".join(f"{title} {test[key]:.3f}" for key, title in _METRICS.items() if key in test)


def _of_report(report: Any) -> str:
    answer = report["answer"]
    return f"use {answer['setting']}, {answer['speedup']['value']:.2f} times the target alone"


def _of_draft(description: Any) -> str:
    after = description["test"]["after"]
    return ", ".join(f"{name} {value:.3f}" for name, value in after.items())
