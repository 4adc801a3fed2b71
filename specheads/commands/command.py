"""Entry points: compose a Hydra config, run, and turn mistakes and failures of the machine into one
message and exit code 2.

The folder of a run, `${run_folder:}` in conf/base.yaml, is that of the interrupted run with the
same config, or a new one.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shlex
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from specheads import interrupts
from specheads.commands.compose import check_keys, register, verb_of
from specheads.commands.help import composition_error, help_text
from specheads.commands.main import EXIT_USER_ERROR
from specheads.commands.runs import jobs_of, print_runs
from specheads.errors import UserError, user_error
from specheads.load import warn_if_busy
from specheads.pair.locations import check_available
from specheads.processes import Processes, from_first, is_first_process
from specheads.settings import Settings, config_folder, shown
from specheads.storage import runs
from specheads.storage.files import without_home

_HELP = re.compile(r"-h|--help(=\S*)?")
_OPTION = re.compile(
    r"--(help|hydra-help|version|cfg|resolve|info|package|multirun|run|(config|experimental|shell)-\w+)(=.*)?"
)
# What a head and its evaluation must have in common.
_SHARED_KEYS = (
    "model",
    "data",
    "warp",
    "generation",
    "runner",
    "vllm",
    "server",
    "ray",
    "paths",
    "seed",
)
_SHARED_VERBS = ("train", "distill")  # torchrun and srun may start these
_WHERE = (
    "accelerator",
    "devices",
    "num_nodes",
    "strategy",
)  # arguments of a trainer that do not decide what a run computes

taken: set[Path] = set()  # folders of runs and sweeps that this process works in


@dataclass(frozen=True)
class Command:
    """A function of a config conf/<name>.yaml with the fields of `classes`.

    Calling it runs the command line of this process.

    Its runs are in the folder `folder` of paths.outputs.
    """

    name: str
    run: Callable[..., Any]
    classes: tuple[type[Settings], ...]
    folder: str

    def __call__(self) -> None:
        CommandLine(self.name).run()


class CommandLine:
    """The command line of this process for conf/<name>.yaml; a failed job ends no sweep.

    What runs it is imported only when its config is composed, as that takes seconds.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.verb = verb_of(name)
        self.failed = False

    def run(self) -> None:
        """Run it, or print the help that it asks for; SystemExit if it fails or is interrupted."""
        taken.clear()
        os.environ["HYDRA_FULL_ERROR"] = "1"  # lets composition errors through to here
        # Options first, as Hydra's parser reads no overrides after one that follows others.
        words = sys.argv[1:] = sorted(
            sys.argv[1:], key=lambda word: word[:1] != "-" and ("=" in word or word[:1] == "~")
        )
        try:
            if dashed := [
                word for word in words if word.startswith("--") and not _OPTION.fullmatch(word)
            ]:
                key = dashed[0].lstrip("-").partition("=")[0]
                raise UserError(
                    f"{dashed[0]} is no option; keys have no dashes: write {key}=<value>."
                )
            processes = Processes.this()
            if processes.count > 1 and self.name not in _SHARED_VERBS:
                raise UserError(
                    f"{processes.launcher} has started {processes.count} processes of this command,"
                    " which is one process; start it once, with plain python. Only specheads train"
                    " and distill share their work over processes."
                )
            # Only the first process of a launcher prints what is not an error.
            with contextlib.redirect_stdout(
                sys.stdout if processes.is_first or processes.launcher is None else StringIO()
            ):
                if asked := [word for word in words if _HELP.fullmatch(word)]:
                    print(
                        help_text(self.name, _overrides_of(words), of=asked[-1].partition("=")[2])
                    )
                else:
                    register(self.name)
                    register_resolver()
                    interrupts.listen()

                    def job(cfg: DictConfig) -> None:
                        self.job(cfg)

                    job.__module__ = (  # Hydra names the log after it
                        f"specheads.commands.{self.verb.module}"
                    )
                    hydra.main(
                        version_base="1.3",
                        config_path=str(config_folder().resolve()),
                        config_name=self.name,
                    )(job)()
        except interrupts.Interrupted as interruption:
            if not is_first_process():
                raise SystemExit(0) from None  # the first one speaks for all
            again = "the same command" if may_resume() else "the same command without resume=false"
            print(
                f"{interruption}; {again} resumes it" if taken else str(interruption),
                file=sys.stderr,
            )
            raise SystemExit(interruption.exit_code) from None
        except Exception as error:
            if not self._tell(error):
                raise
        if (jobs := [job for folder in taken for job in jobs_of(folder)]) and is_first_process():
            print_runs(jobs)
        if self.failed:
            raise SystemExit(EXIT_USER_ERROR)
        for folder in taken:
            runs.finish(folder)

    def job(self, cfg: DictConfig) -> None:
        """Run one composed config: the only one, or one of a sweep."""
        try:
            if not isinstance(cfg.resume, bool):
                raise UserError(f"resume={shown(cfg.resume)} must be true or false.")
            if isinstance(head := cfg.get("head"), str) and head != "latest":
                check_available("head", head)
            command = self.verb.load()  # it takes seconds
            check_keys(cfg, command.classes)
            if (
                processes := Processes.this()
            ).launcher is not None:  # each of its processes uses a GPU of its own
                import torch  # slow, and not every command needs it

                if processes.local_rank < torch.cuda.device_count():
                    torch.cuda.set_device(processes.local_rank)
            if _begin():
                warn_if_busy()
                folder = Path(HydraConfig.get().runtime.output_dir)
                # Reports, logs and commands repeat it.
                cfg.paths.run = str(
                    folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
                )
                command.run(cfg)
                if is_first_process():
                    runs.finish(folder)
        except Exception as error:
            if not self._tell(error):
                raise

    def _tell(self, error: Exception) -> bool:
        """Print the message of a user's mistake; return whether it is one."""
        message = user_error(error) or composition_error(error, self.name, sys.argv[1:])
        if message is None:
            return False
        self.failed = True
        where = ""
        with contextlib.suppress(UserError):  # the launcher's variables may be this mistake
            processes = Processes.this()
            where = (
                ""
                if processes.is_first
                else f" in process {processes.rank} on {socket.gethostname()}"
            )
        print(f"error{where}: {message}", file=sys.stderr)
        return True


def command(
    name: str, *classes: type[Settings], folder: str | None = None
) -> Callable[[Callable[..., Any]], Command]:
    """Return a decorator that makes a Command of a function."""
    return lambda run: Command(name, run, classes, folder or name)


def next_command(verb: str, *overrides: str) -> str:
    """Return the command line that follows this one, with its folder of configs, and its overrides
    that both commands share.
    """
    given = []
    folders = []
    if HydraConfig.initialized():
        hydra_cfg = HydraConfig.get()
        given = [
            (override.lstrip("+").split("=")[0], override) for override in hydra_cfg.overrides.task
        ]
        folders = [
            source.path
            for source in hydra_cfg.runtime.config_sources
            if source.provider == "command-line"
        ]
    replaced = {override.split("=")[0] for override in overrides}
    kept = [
        override
        for key, override in given
        if key.split(".")[0] in _SHARED_KEYS and key not in replaced
    ]
    config = ["--config-dir", os.path.relpath(folders[0])] if folders else []
    return shlex.join(["specheads", verb, *config, *kept, *overrides])


def _overrides_of(words: list[str]) -> list[str]:
    """Return the overrides among the words of a command line, for composing its config.

    A folder of configs is one of them.
    """
    options = ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--config-dir", "-cd")
    given, others = options.parse_known_args(words)
    overrides = [word for word in others if "=" in word and not word.startswith("-")]
    return overrides + (
        [f"hydra.searchpath=['file://{Path(given.config_dir).resolve()}']"]
        if given.config_dir
        else []
    )


class NoteRunKey(Callback):
    """Hydra callback that notes the key of the configuration, or of the whole sweep, before this
    process runs anything.
    """

    key = ""
    resume = True

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the key of a run; let the first process alone write files."""
        NoteRunKey.key = _run_key(config)
        NoteRunKey.resume = config.resume
        if not is_first_process():
            with read_write(config), open_dict(config):
                config.hydra.output_subdir = None
                config.hydra.job_logging.root.handlers = ["console"]
                config.hydra.job_logging.handlers.pop("file", None)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        NoteRunKey.key = _run_key(config)
        NoteRunKey.resume = config.resume

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.hydra.output_subdir is not None:
            for path in Path(config.hydra.runtime.output_dir, config.hydra.output_subdir).glob(
                "*.yaml"
            ):
                path.write_text(without_home(path.read_text()))


def may_resume() -> bool:
    """Whether the run of this process may resume an interrupted run."""
    return (
        NoteRunKey.resume is not False or Processes.this().restarts > 0
    )  # what the launcher restarts, it has begun


def register_resolver() -> None:
    """Make `${run_folder:}` known to configs; all processes of a run get the same folder."""
    chosen: list[str] = []

    def resolve(*, _root_: DictConfig) -> str:
        parent = Path(_root_.paths.outputs, _root_.command)
        try:
            if not chosen:
                chosen.append(
                    from_first(lambda: str(runs.run_folder(parent, NoteRunKey.key, may_resume())))
                )
        except OSError:
            return str(parent / "run")  # Hydra raises the same error again, and does not wrap it
        return chosen[0]

    OmegaConf.register_new_resolver("run_folder", resolve, replace=True)


def _run_key(config: DictConfig) -> str:
    """Return a key of a composed configuration.

    It does not depend on Hydra's folders, on `resume`, or on where it computes.
    """
    settings = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    overrides = settings.pop("hydra")["overrides"]["task"]
    ignored = {"resume", "verbose"}
    settings = {key: value for key, value in settings.items() if key not in ignored}
    if isinstance(trainer := settings.get("trainer"), dict):
        settings["trainer"] = {name: value for name, value in trainer.items() if name not in _WHERE}
    ignored |= {f"trainer.{name}" for name in _WHERE}
    kept = sorted(
        override for override in overrides if override.lstrip("+~").split("=")[0] not in ignored
    )
    return hashlib.sha256(
        json.dumps([settings, kept], sort_keys=True, default=str).encode()
    ).hexdigest()[:16]


def _begin() -> bool:
    """Take the run's folder; return False for a finished job of a sweep.

    Raises UserError if another process works there.
    """
    hydra_cfg = HydraConfig.get()
    folder = Path(hydra_cfg.runtime.output_dir)
    is_sweep = hydra_cfg.mode == RunMode.MULTIRUN
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
