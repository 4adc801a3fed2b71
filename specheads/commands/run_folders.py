"""The folder of a run: that of the interrupted run with the same configuration, or a new one.

Hydra asks the resolver `${run_folder:}` of conf/base.yaml where a run goes.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from specheads.commands.agreement import decided
from specheads.processes import Processes
from specheads.storage import runs

WHERE = ("accelerator", "devices", "num_nodes", "strategy")  # arguments of a trainer that do not decide what a run computes


class NoteRunKey(Callback):
    """Hydra callback that notes the key of the configuration, or of the whole sweep, before this process runs anything."""

    key = ""
    resume: bool | str = True

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        NoteRunKey.key, NoteRunKey.resume = run_key(config), config.resume

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        NoteRunKey.key, NoteRunKey.resume = run_key(config), config.resume


def may_resume() -> bool:
    """Whether the run of this process may resume an interrupted run."""
    return NoteRunKey.resume is not False or Processes.this().restarts > 0  # what the launcher restarts, it has begun


def register_resolver() -> None:
    """Make `${run_folder:}` known to configs; every use in the processes of a run gives the same folder."""
    chosen: list[Path] = []

    def resolve(*, _root_: DictConfig) -> str:
        parent = Path(_root_.paths.outputs) / _root_.command
        try:
            if not chosen:
                chosen.append(Path(decided(lambda: str(runs.run_folder(parent, NoteRunKey.key, may_resume())))))
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
