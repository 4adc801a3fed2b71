"""Run folders: `outputs/<command>/<date_time>/`, where the same command finds an interrupted run again.

`run.json` in a folder has the run's key, which tells one configuration from another, and whether the run was finished.
"""

import json
import logging
import time
from pathlib import Path
from typing import Any, TextIO

from specheads.errors import UserError
from specheads.storage.files import lock, write_json

logger = logging.getLogger(__name__)

STATE, LOCK = "run.json", ".lock"

# Locks of run folders that this process has taken; they last as long as it does.
_locks: dict[Path, TextIO] = {}


def run_folder(parent: Path, key: str, resume: bool = True) -> Path:
    """Return the folder of a run with this key under `parent`, and take it for this process.

    It is the newest folder with the same key if that run was not finished and nobody works in it; else a new one.
    """
    if resume:
        same = [state.parent for state in sorted(parent.glob(f"*/{STATE}")) if read_state(state.parent).get("key") == key]
        if same and is_unfinished(same[-1], key):
            if _take(same[-1]):
                return same[-1]
            logger.warning("a process is still at work in %s, the unfinished run of this command; a new run begins", same[-1])
    stamp = folder = parent / time.strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    while not _make(folder):  # another run of the same second
        number += 1
        folder = stamp.with_name(f"{stamp.name}-{number}")
    return folder


def _make(folder: Path) -> bool:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    return _take(folder)


def _take(folder: Path) -> bool:
    """Whether the folder is this process's from now on."""
    key = folder.absolute()
    if key not in _locks:
        stream = lock(folder / LOCK)
        if stream is None:
            return False
        _locks[key] = stream
    return True


def release() -> None:
    """Let go of the folders; for a forked process, which would otherwise hold them after this one has ended."""
    for stream in _locks.values():
        stream.close()
    _locks.clear()


def read_state(folder: Path) -> dict[str, Any]:
    """Return a run folder's state, empty where there is none that can be read."""
    try:
        state = json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def is_unfinished(folder: Path, key: str) -> bool:
    """Whether a run with this key began in `folder` and did not end."""
    state = read_state(folder)
    return state.get("key") == key and not state.get("finished")


def has_ended(folder: Path, top: Path) -> bool:
    """Whether every run that `folder`, below `top`, is part of was finished; what no run has written counts as finished."""
    states = [read_state(above) for above in folder.parents if above.is_relative_to(top)]
    return all(state.get("finished") for state in states if state)


def begin(folder: Path, key: str, resume: bool = True) -> None:
    """Take a run folder for this process.

    Raises:
        UserError: another process is working in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not _take(folder):
        raise UserError(f"another run is working in {folder}; wait until it is done, or give this one another folder.")
    resumed = resume and is_unfinished(folder, key)
    if resumed:
        logger.info("resumes the unfinished run in %s (resume=false starts a new one)", folder)
    write_json(folder / STATE, {"key": key, "finished": False, "resumed": resumed})


def begin_job(sweep: Path, folder: Path) -> bool:
    """Take the folder of one job of a sweep; return False where an interrupted run of this sweep has finished it already."""
    if is_resumed(sweep) and read_state(folder).get("finished"):
        logger.info("already done: %s", folder)
        return False
    write_json(folder / STATE, read_state(sweep))
    return True


def is_resumed(folder: Path) -> bool:
    """Whether the run in `folder` was begun earlier and interrupted."""
    return bool(read_state(folder).get("resumed"))


def finish(folder: Path) -> None:
    """Record that a run, or one job of a sweep, is done."""
    write_json(folder / STATE, {**read_state(folder), "finished": True})
