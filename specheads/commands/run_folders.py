"""The folder of a run: that of the interrupted run with the same configuration, or a new one.

Hydra asks the resolver `${run_folder:}` of conf/base.yaml where a run goes. The jobs of a sweep may run in other processes, here
or on other machines (Hydra's launchers joblib and submitit): the process of the command line takes the folder of the sweep, and
each process that a launcher starts takes those of its jobs. There the command is imported by its name.
"""

import hashlib
import json
import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from specheads import interrupts
from specheads.errors import UserError
from specheads.processes import Processes, from_first, is_first_process
from specheads.storage import runs
from specheads.storage.files import without_home

_WHERE = ("accelerator", "devices", "num_nodes", "strategy")  # arguments of a trainer that do not decide what a run computes
_BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"  # it runs one job after another in this process

taken: set[Path] = set()  # folders of runs and sweeps that this process works in
_sweep: Path | None = None  # the folder of the sweep whose jobs run in other processes, in that of the command line
is_launched = False  # whether a launcher has started this process for jobs of a sweep


class NoteRunKey(Callback):
    """Hydra callback that notes the key of the configuration, or of the whole sweep, before this process runs anything.

    It also leaves the user's home folder out of the files that Hydra writes, and lets the first process alone write files.
    """

    key = ""
    resume = True

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the key of a run; let the first process alone write files."""
        NoteRunKey.key, NoteRunKey.resume = _run_key(config), config.resume
        if not is_first_process():
            with read_write(config), open_dict(config):
                config.hydra.output_subdir = None
                config.hydra.job_logging.root.handlers = ["console"]
                config.hydra.job_logging.handlers.pop("file", None)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Take the folder of a sweep whose jobs run in other processes.

        Raises SystemExit if another process works in it: of another error Hydra would only warn.
        """
        global _sweep
        NoteRunKey.key, NoteRunKey.resume = _run_key(config), config.resume
        if config.hydra.launcher._target_ != _BASIC:
            _sweep = Path(config.hydra.sweep.dir)
            try:
                _take(_sweep)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                raise SystemExit(2) from None

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.hydra.output_subdir is not None:
            for path in Path(config.hydra.runtime.output_dir, config.hydra.output_subdir).glob("*.yaml"):
                path.write_text(without_home(path.read_text()))


def may_resume() -> bool:
    """Whether the run of this process may resume an interrupted run."""
    return NoteRunKey.resume is not False or Processes.this().restarts > 0  # what the launcher restarts, it has begun


def register_resolver(folder: Path | None = None) -> None:
    """Make `${run_folder:}` known to configs; all processes of a run get the same folder, which is `folder` if it is known."""
    chosen = [] if folder is None else [str(folder)]

    def resolve(*, _root_: DictConfig) -> str:
        parent = Path(_root_.paths.outputs, _root_.command)
        try:
            if not chosen:
                chosen.append(from_first(lambda: str(runs.run_folder(parent, NoteRunKey.key, may_resume()))))
        except OSError:
            return str(parent / "run")  # Hydra raises the same error again, and does not wrap it
        return chosen[0]

    OmegaConf.register_new_resolver("run_folder", resolve, replace=True)


def _run_key(config: DictConfig) -> str:
    """Return a key of a composed configuration; it does not depend on Hydra's folders, on `resume`, or on where it computes."""
    settings = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    settings.pop("resume", None)
    overrides, ignored = settings.pop("hydra")["overrides"]["task"], {"resume", *(f"trainer.{name}" for name in _WHERE)}
    if isinstance(trainer := settings.get("trainer"), dict):
        settings["trainer"] = {name: value for name, value in trainer.items() if name not in _WHERE}
    kept = sorted(override for override in overrides if override.lstrip("+~").split("=")[0] not in ignored)
    return hashlib.sha256(json.dumps([settings, kept], sort_keys=True, default=str).encode()).hexdigest()[:16]


def _take(folder: Path) -> None:
    """Begin a run or a sweep in its folder, or resume it. Raises UserError if another process works there."""
    if folder not in taken:
        runs.begin(folder, NoteRunKey.key, may_resume())
        taken.add(folder)


def begin() -> bool:
    """Take the folder of the run; return whether there is something to do: a finished job of a sweep is not repeated.

    Raises:
        UserError: another process works in the folder.
    """
    hydra_cfg = HydraConfig.get()
    folder, is_sweep = Path(hydra_cfg.runtime.output_dir), hydra_cfg.mode == RunMode.MULTIRUN
    top = Path(hydra_cfg.sweep.dir) if is_sweep else folder
    if is_launched:
        interrupts.listen()
        if not runs.take(folder):
            raise UserError(
                f"another process still works in {folder}, a job that an earlier command has launched; wait until it has ended, "
                "or end it (scancel), and run the command again."
            )
        return runs.begin_job(top, folder)

    def begin_first() -> bool:
        _take(top)
        return not is_sweep or runs.begin_job(top, folder)

    begun_by_another = not is_first_process() and Processes.this().launcher is None
    return begun_by_another or from_first(begin_first)


def by_name(command: Any) -> tuple[Any, ...]:
    """Return how another process finds a command again, as `__reduce__` does."""
    module = command.run.__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]  # of `python -m`
    return _command, (module, command.run.__name__, str(_sweep), os.getpid())


def _command(module: str, name: str, folder: str, process: int) -> Any:
    """Return a command in a process that a launcher has started, or in the one that has named it."""
    global is_launched
    command = getattr(import_module(module), name)
    if process != os.getpid():
        is_launched = True
        register_resolver(Path(folder))
    return command


class WithoutHome(logging.Formatter):
    """A formatter that writes `~` for the user's home folder: logs are shown to others."""

    def format(self, record: logging.LogRecord) -> str:
        return without_home(super().format(record))
