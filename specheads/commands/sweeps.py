"""Sweeps whose jobs run in other processes, on this machine or others: Hydra's launchers joblib and submitit.

The process of the command line takes the folder of the sweep, and each process that a launcher starts takes those of its jobs.
There the command is imported by its name.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from specheads import interrupts
from specheads.commands.run_folders import NoteRunKey, may_resume, register_resolver
from specheads.errors import UserError
from specheads.storage import runs

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"  # which runs one job after another in this process

sweep: Path | None = None  # the folder of the sweep whose jobs run in other processes, in that of the command line
_is_launched = False


class BeginSweep(Callback):
    """Hydra callback that takes the folder of a sweep whose jobs run in other processes."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Take it. Raises SystemExit if another process works in it: of another error Hydra would only warn."""
        global sweep
        if config.hydra.launcher._target_ == BASIC:
            return
        sweep = Path(config.hydra.sweep.dir)
        try:
            runs.begin(sweep, NoteRunKey.key, may_resume())
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None


def is_launched() -> bool:
    """Return whether a launcher has started this process for jobs of a sweep."""
    return _is_launched


def begin_launched() -> bool:
    """Take the folder of a job in the process that a launcher has started for it; return False if it is done already.

    Raises:
        UserError: another process, that an earlier command has launched, still works in it.
    """
    interrupts.listen()
    hydra_cfg = HydraConfig.get()
    folder = Path(hydra_cfg.runtime.output_dir)
    if not runs.take(folder):
        raise UserError(
            f"another process still works in {folder}, a job that an earlier command has launched; wait until it has ended, or "
            "end it (scancel), and run the command again."
        )
    return runs.begin_job(Path(hydra_cfg.sweep.dir), folder)


def by_name(command: Any) -> tuple[Any, ...]:
    """Return how another process finds a command again, as `__reduce__` does."""
    module = command.run.__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]  # of `python -m`
    return _command, (module, command.run.__name__, str(sweep), os.getpid())


def _command(module: str, name: str, folder: str, process: int) -> Any:
    """Return a command in a process that a launcher has started, or in the one that has named it."""
    global _is_launched
    command = getattr(import_module(module), name)
    if process != os.getpid():
        _is_launched = True
        register_resolver(Path(folder))
    return command
