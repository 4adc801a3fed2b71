"""The folder of a run, `${run_folder:}` in conf/base.yaml: that of the interrupted run with the same config, or a new one."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from specheads.processes import Processes, from_first, is_first_process
from specheads.storage import runs
from specheads.storage.files import without_home

_WHERE = ("accelerator", "devices", "num_nodes", "strategy")  # arguments of a trainer that do not decide what a run computes

taken: set[Path] = set()  # folders of runs and sweeps that this process works in


class NoteRunKey(Callback):
    """Hydra callback that notes the key of the configuration, or of the whole sweep, before this process runs anything."""

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
        NoteRunKey.key, NoteRunKey.resume = _run_key(config), config.resume

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.hydra.output_subdir is not None:
            for path in Path(config.hydra.runtime.output_dir, config.hydra.output_subdir).glob("*.yaml"):
                path.write_text(without_home(path.read_text()))


def may_resume() -> bool:
    """Whether the run of this process may resume an interrupted run."""
    return NoteRunKey.resume is not False or Processes.this().restarts > 0  # what the launcher restarts, it has begun


def register_resolver() -> None:
    """Make `${run_folder:}` known to configs; all processes of a run get the same folder."""
    chosen: list[str] = []

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
    overrides, ignored = settings.pop("hydra")["overrides"]["task"], {"resume", "verbose"}
    settings = {key: value for key, value in settings.items() if key not in ignored}
    if isinstance(trainer := settings.get("trainer"), dict):
        settings["trainer"] = {name: value for name, value in trainer.items() if name not in _WHERE}
    ignored |= {f"trainer.{name}" for name in _WHERE}
    kept = sorted(override for override in overrides if override.lstrip("+~").split("=")[0] not in ignored)
    return hashlib.sha256(json.dumps([settings, kept], sort_keys=True, default=str).encode()).hexdigest()[:16]


def begin() -> bool:
    """Take the run's folder; return False for a finished job of a sweep. Raises UserError if another process works there."""
    hydra_cfg = HydraConfig.get()
    folder, is_sweep = Path(hydra_cfg.runtime.output_dir), hydra_cfg.mode == RunMode.MULTIRUN
    top = Path(hydra_cfg.sweep.dir) if is_sweep else folder

    def begin_first() -> bool:
        if top not in taken:
            runs.begin(top, NoteRunKey.key, may_resume())
            taken.add(top)
        return not is_sweep or runs.begin_job(top, folder)

    begun_by_another = not is_first_process() and Processes.this().launcher is None
    return begun_by_another or from_first(begin_first)


class WithoutHome(logging.Formatter):
    """A formatter that writes `~` for the user's home folder: logs are shown to others."""

    def format(self, record: logging.LogRecord) -> str:
        return without_home(super().format(record))
