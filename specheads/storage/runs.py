"""Run folders, `outputs/<command>/<date_time>/`: the same command finds an interrupted run again
and resumes it.

`run.json` in a folder holds the run's key, which identifies its configuration, and whether the run
is finished.
"""

import contextlib
import itertools
import json
import logging
import time
from pathlib import Path
from typing import Any

from filelock import FileLock

from specheads.errors import UserError
from specheads.progress import finished
from specheads.storage.files import lock, write_json

logger = logging.getLogger(__name__)

STATE = "run.json"
LOCK = ".lock"

# Locks of the run folders that this process has taken, held until it ends.
_locks: dict[Path, FileLock] = {}


def run_folder(parent: Path, key: str, resume: bool = True) -> Path:
    """Return the newest folder under `parent` of an unfinished run with this key, or else a new
    one, locked for this process.
    """
    same = []
    for state in sorted(parent.glob(f"*/{STATE}")) if resume else ():
        if read_state(state.parent).get("key") == key:
            same.append(state.parent)
    if same and not read_state(newest := same[-1]).get("finished"):
        if take(newest):
            return newest
        logger.warning(
            "another process still works in %s, the unfinished run of this command; a new run"
            " begins",
            newest,
        )
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number in itertools.count(1):
        # Another run may have begun in the same second.
        folder = parent / (stamp if number == 1 else f"{stamp}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            if take(folder):
                return folder
    raise AssertionError


def take(folder: Path) -> bool:
    """Lock a run folder until this process ends; return False if another process has it."""
    key = folder.absolute()
    if key not in _locks:
        held = lock(folder / LOCK)
        if held is None:
            return False
        _locks[key] = held
    return True


def read_state(folder: Path) -> dict[str, Any]:
    """Return a run folder's state, empty if it cannot be read."""
    try:
        state = json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def has_ended(folder: Path, top: Path) -> bool:
    """Return whether all runs that `folder` (below `top`) belongs to are finished.

    Without runs it counts as finished.
    """
    states = [read_state(parent) for parent in folder.parents if parent.is_relative_to(top)]
    return all(state.get("finished") for state in states if state)


def begin(folder: Path, key: str, resume: bool = True) -> None:
    """Lock a run folder and record that the run has begun.

    Raises UserError if another process is working in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not take(folder):
        raise UserError(
            f"another run is working in {folder}; wait until it has finished, or use another"
            " folder."
        )
    state = read_state(folder)
    resumed = resume and state.get("key") == key and not state.get("finished")
    if resumed:
        here = Path.cwd()
        shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
        finished("resuming", f"{shown} (resume=false starts a new one)")
    write_json(folder / STATE, {"key": key, "finished": False, "resumed": resumed})


def begin_job(sweep: Path, folder: Path) -> bool:
    """Begin one job of a sweep.

    Return False if an interrupted run of this sweep has finished it already.
    """
    if is_resumed(sweep) and read_state(folder).get("finished"):
        logger.info("already done: %s", folder)
        return False
    write_json(folder / STATE, read_state(sweep))
    return True


def is_resumed(folder: Path) -> bool:
    """Return whether the run in `folder` resumes an interrupted one."""
    return bool(read_state(folder).get("resumed"))


def finish(folder: Path) -> None:
    """Record that a run, or one job of a sweep, is finished."""
    write_json(folder / STATE, {**read_state(folder), "finished": True})
