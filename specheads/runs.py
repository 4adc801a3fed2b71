"""Run folders: `outputs/<command>/<date_time>/`, where the same command finds an interrupted run again.

`run.json` in a folder says which configuration it is of and whether it was finished. Hydra asks `run_folder` (through the
resolver of that name in conf/base.yaml) where a run goes: into the newest unfinished folder of the same configuration that
no process is working in, else into a new one.
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

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        Identify.identity = identity(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        Identify.identity = identity(config)


def register_resolver() -> None:
    """Make `${run_folder:}` known to configs; every use within one process gives the same folder."""
    chosen: list[Path] = []

    def resolve(*, _root_: DictConfig) -> str:
        if not chosen:
            chosen.append(run_folder(Path(_root_.paths.outputs) / _root_.command, Identify.identity, _root_.resume is True))
        return str(chosen[0])

    OmegaConf.register_new_resolver("run_folder", resolve, replace=True)


def run_folder(parent: Path, wanted: str, resume: bool) -> Path:
    """Return the newest unfinished folder of the configuration `wanted` under `parent`, or the name of a new one."""
    if resume:
        for state in sorted(parent.glob(f"*/{STATE}"), reverse=True):
            if is_unfinished(state.parent, wanted) and not is_locked(state.parent):
                return state.parent
    stamp = folder = parent / time.strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    while folder.exists():  # a second run within the second
        number += 1
        folder = stamp.with_name(f"{stamp.name}-{number}")
    return folder


def identity(config: DictConfig) -> str:
    """Return what tells one composed configuration from another; where Hydra puts things and `resume` do not matter."""
    settings = OmegaConf.to_container(config, resolve=False)
    overrides = settings.pop("hydra")["overrides"]["task"]
    settings.pop("resume", None)
    overrides = sorted(override for override in overrides if not override.startswith("resume="))
    return hashlib.sha256(json.dumps([settings, overrides], sort_keys=True, default=str).encode()).hexdigest()[:16]


def read_state(folder: Path) -> dict[str, Any]:
    """Return a run folder's state, empty where there is none that can be read."""
    try:
        state = json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def is_unfinished(folder: Path, wanted: str) -> bool:
    state = read_state(folder)
    return state.get("identity") == wanted and not state.get("finished")


def is_locked(folder: Path) -> bool:
    """Whether a process is working in a run folder."""
    stream = lock(folder / LOCK)
    if stream is None:
        return True
    stream.close()
    return False


def begin(folder: Path) -> TextIO:
    """Take a run folder for this process; keep what is returned for as long as the run lasts.

    Raises:
        UserError: another process is working in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stream = lock(folder / LOCK)
    if stream is None:
        raise UserError(f"another run is working in {folder}; wait until it is done, or start again for a folder of its own.")
    resumed = is_unfinished(folder, Identify.identity)
    if resumed:
        logger.info("goes on with the unfinished run in %s (resume=false starts anew)", folder)
    write_json(folder / STATE, {"identity": Identify.identity, "finished": False, "resumed": resumed})
    return stream


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
