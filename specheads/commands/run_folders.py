"""The folder of a run: that of the interrupted run with the same configuration, or a new one.

Hydra asks the resolver `${run_folder:}` of conf/base.yaml where a run goes.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from specheads.processes import Processes, from_first, is_first_process
from specheads.storage import runs
from specheads.storage.files import without_home

WHERE = ("accelerator", "devices", "num_nodes", "strategy")  # arguments of a trainer that do not decide what a run computes


class NoteRunKey(Callback):
    """Hydra callback that notes the key of the configuration, or of the whole sweep, before this process runs anything.

    It also leaves the user's home folder out of the files that Hydra writes, which the first process alone lets it write.
    """

    key = ""
    resume: bool | str = True

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        NoteRunKey.key, NoteRunKey.resume = run_key(config), config.resume
        if not is_first_process():
            with read_write(config):
                config.hydra.output_subdir = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        NoteRunKey.key, NoteRunKey.resume = run_key(config), config.resume

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.hydra.output_subdir is not None:
            for path in Path(config.hydra.runtime.output_dir, config.hydra.output_subdir).glob("*.yaml"):
                path.write_text(without_home(path.read_text()))


def may_resume() -> bool:
    """Whether the run of this process may resume an interrupted run."""
    return NoteRunKey.resume is not False or Processes.this().restarts > 0  # what the launcher restarts, it has begun


def register_resolver(folder: Path | None = None) -> None:
    """Make `${run_folder:}` known to configs; all processes of a run get the same folder, which is `folder` if it is known."""
    chosen = [] if folder is None else [folder]

    def resolve(*, _root_: DictConfig) -> str:
        parent = Path(_root_.paths.outputs) / _root_.command
        try:
            if not chosen:
                chosen.append(Path(from_first(lambda: str(runs.run_folder(parent, NoteRunKey.key, may_resume())))))
        except OSError:
            return str(parent / "run")  # Hydra raises the same error again, and does not wrap it
        return str(chosen[0])

    OmegaConf.register_new_resolver("run_folder", resolve, replace=True)


def run_key(config: DictConfig) -> str:
    """Return a key of a composed configuration; it does not depend on Hydra's folders, on `resume`, or on where it computes."""
    settings = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    overrides = settings.pop("hydra")["overrides"]["task"]
    if isinstance(trainer := settings.get("trainer"), dict):
        settings["trainer"] = {name: value for name, value in trainer.items() if name not in WHERE}
    overrides = [
        override for override in overrides if override.lstrip("+~").split("=")[0] not in [f"trainer.{name}" for name in WHERE]
    ]
    if isinstance(settings.get("resume"), bool):
        settings.pop("resume")
        overrides = [override for override in overrides if not override.startswith("resume=")]
    return hashlib.sha256(json.dumps([settings, sorted(overrides)], sort_keys=True, default=str).encode()).hexdigest()[:16]
