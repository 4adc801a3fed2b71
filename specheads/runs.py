"""Run folders: `outputs/<command>/<date_time>/`, where the same command finds an interrupted run again.

`run.json` in a folder says which configuration it is of and whether it was finished. Hydra asks `run_folder` (through the
resolver of that name in conf/base.yaml) where a run goes: into the newest folder of the same configuration if that run was
interrupted, else into a new one.
"""

import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any, TextIO

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from specheads.errors import UserError
from specheads.files import lock, write_json

logger = logging.getLogger(__name__)

STATE, LOCK = "run.json", ".lock"


class Identify(Callback):
    """Hydra callback that notes what configuration this process runs, sweeps included, before anything else happens."""

    identity = ""
    resume: bool | str = True

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        Identify.identity, Identify.resume = identity(config), config.resume

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        Identify.identity, Identify.resume = identity(config), config.resume


def register_resolver() -> None:
    """Make `${run_folder:}` known to configs; every use within one process gives the same folder."""
    chosen: list[Path] = []

    def resolve(*, _root_: DictConfig) -> str:
        parent = Path(_root_.paths.outputs) / _root_.command
        try:
            if not chosen:
                chosen.append(run_folder(parent))
        except OSError:
            return str(parent / "run")  # Hydra will meet the same refusal, but not hide it inside an error of its own
        return str(chosen[0])

    OmegaConf.register_new_resolver("run_folder", resolve, replace=True)


# Locks of run folders that this process has taken; they last as long as it does.
_locks: dict[Path, TextIO] = {}


def run_folder(parent: Path) -> Path:
    """Return the folder of this process's run under `parent`, and take it.

    It is the newest one of the same configuration if that was not finished and nobody works in it; else a new one.
    """
    if Identify.resume is not False:
        same = [
            state.parent
            for state in sorted(parent.glob(f"*/{STATE}"))
            if read_state(state.parent).get("identity") == Identify.identity
        ]
        if same and is_unfinished(same[-1]):
            if _take(same[-1]):
                return same[-1]
            logger.warning("a process is still at work in %s, the unfinished run of this command; a new one begins", same[-1])
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


def identity(config: DictConfig) -> str:
    """Return what tells one composed configuration from another; where Hydra puts things and whether to resume do not matter."""
    settings = OmegaConf.to_container(config, resolve=False)
    overrides = settings.pop("hydra")["overrides"]["task"]
    if isinstance(settings.get("resume"), bool):
        settings.pop("resume")
        overrides = [override for override in overrides if not override.startswith("resume=")]
    return hashlib.sha256(json.dumps([settings, sorted(overrides)], sort_keys=True, default=str).encode()).hexdigest()[:16]


def read_state(folder: Path) -> dict[str, Any]:
    """Return a run folder's state, empty where there is none that can be read."""
    try:
        state = json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def is_unfinished(folder: Path) -> bool:
    """Whether a run of this configuration began in `folder` and did not end."""
    state = read_state(folder)
    return state.get("identity") == Identify.identity and not state.get("finished")


def has_ended(folder: Path, top: Path) -> bool:
    """Whether every run that `folder`, below `top`, is part of was finished; what no run has written counts as finished."""
    states = [read_state(above) for above in folder.parents if above.is_relative_to(top)]
    return all(state.get("finished") for state in states if state)


def begin(folder: Path) -> None:
    """Take a run folder for this process.

    Raises:
        UserError: another process is working in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not _take(folder):
        raise UserError(f"another run is working in {folder}; wait until it is done, or give this one another folder.")
    resumed = Identify.resume is not False and is_unfinished(folder)
    if resumed:
        logger.info("goes on with the unfinished run in %s (resume=false starts anew)", folder)
    write_json(folder / STATE, {"identity": Identify.identity, "finished": False, "resumed": resumed})


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
