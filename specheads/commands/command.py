"""A command line with a config: compose it, run its function, and turn mistakes and failures of the
machine into one message and exit code 2.

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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import cast

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from specheads import interrupts
from specheads.commands import checks
from specheads.commands.compose import command_config, register
from specheads.commands.help import composition_error, help_text
from specheads.commands.runs import jobs_of, print_runs
from specheads.commands.verbs import Verb
from specheads.errors import EXIT_USER_ERROR, UserError, user_error
from specheads.processes import Processes, from_first, is_first_process
from specheads.progress import be_silent, tell_stages, waiting
from specheads.settings import config_folder
from specheads.storage import runs
from specheads.storage.files import without_home

PLAN = "--plan"  # prints what a command takes, and ends
_HELP = re.compile(r"-h|--help(=\S*)?")
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
_OF_DECODERS = ("model", "warp", "paths")  # those of `specheads generate`, which reads no prompts
_SHARED_VERBS = ("train", "distill")  # torchrun and srun may start these
# Keys that do not decide what a run computes.
_WHERE = ("accelerator", "devices", "num_nodes", "strategy")  # of a trainer
_IGNORED = {"resume", "verbose"} | {f"trainer.{name}" for name in _WHERE}

taken: set[Path] = set()  # folders of runs and sweeps that this process works in


class CommandLine:
    """The command line of this process for a verb with a config; a failed job ends no sweep.

    Every config is checked before anything is imported that takes seconds, and before the folder of
    the run is made: first by `checks.check`, then by `check_more`, with the verb's libraries.
    `load` returns what runs a config.
    """

    def __init__(
        self,
        verb: Verb,
        check_more: Callable[[DictConfig], None],
        load: Callable[[], Callable[..., object]],
    ) -> None:
        assert verb.config is not None
        self.verb = verb
        self.name = verb.config
        self.check_more = check_more
        self.load = load
        self.failed = False

    def run(self) -> None:
        """Run it, or print the help that it asks for; SystemExit if it fails or is interrupted."""
        taken.clear()
        os.environ["HYDRA_FULL_ERROR"] = "1"  # lets composition errors through to here
        words = sys.argv[1:] = _options_first(sys.argv[1:])
        try:
            self._answer(words)
        except interrupts.Interrupted as interruption:
            if not is_first_process():
                raise SystemExit(0) from None  # the first one speaks for all
            print(_resumed_by(interruption), file=sys.stderr)
            raise SystemExit(interruption.exit_code) from None
        except Exception as error:
            if not self._tell(error):
                raise
        jobs = [job for folder in taken for job in jobs_of(folder)]
        if jobs and is_first_process():
            print_runs(jobs)
        if self.failed:
            raise SystemExit(EXIT_USER_ERROR)
        for folder in taken:
            runs.finish(folder)

    def _answer(self, words: list[str]) -> None:
        processes = Processes.this()
        if processes.count > 1 and self.name not in _SHARED_VERBS:
            raise UserError(
                f"{processes.launcher} has started {processes.count} processes of this command,"
                " which is one process; start it once, without a launcher."
            )
        speaks = processes.is_first or processes.launcher is None
        # Only the first process of a launcher prints what is not an error.
        with contextlib.redirect_stdout(sys.stdout if speaks else StringIO()):
            asked = [word for word in words if _HELP.fullmatch(word)]
            if asked:
                of = asked[-1].partition("=")[2]
                print(help_text(self.name, overrides_of(words), of=of))
            elif PLAN in words:
                words.remove(PLAN)
                for cfg in self._checked(words):
                    self.print_plan(cfg)
            else:
                self._checked(words)
                if self.verb.has_run:
                    self._run_by_hydra()
                else:
                    self._run_without_folder(words)

    def print_plan(self, cfg: DictConfig) -> None:
        from specheads.commands import plan  # it imports torch

        plan.render(plan.plan_of(self.verb, cfg))

    def _checked(self, words: Sequence[str]) -> list[DictConfig]:
        """Return the configs that the words lead to.

        Raises UserError for a mistake in one, and Hydra's errors.
        """
        configs = list(configs_of(self.name, words))
        for check in (partial(checks.check, self.verb), self.check_more):
            for cfg in configs:
                check(cfg)
        return configs

    def _run_without_folder(self, words: Sequence[str]) -> None:
        """Run each config of the words in this folder, and write nothing."""
        tell_stages(False)  # standard output is for what it answers
        run = self.load()
        for cfg in configs_of(self.name, words):
            run(cfg)

    def _run_by_hydra(self) -> None:
        register(self.name)
        register_resolver()
        interrupts.listen()

        def job(cfg: DictConfig) -> None:
            self.job(cfg)

        job.__module__ = self.verb.name  # Hydra names the log after it
        folder = str(config_folder().resolve())
        hydra.main(version_base="1.3", config_path=folder, config_name=self.name)(job)()

    def job(self, cfg: DictConfig) -> None:
        """Run one composed config: the only one, or one of a sweep."""
        try:
            tell_stages(True) if is_first_process() else be_silent()
            with waiting("loading PyTorch"):
                run = self.load()
            _take_gpu()
            if is_first_process():
                self._announce(cfg)
            if _begin():
                folder = Path(HydraConfig.get().runtime.output_dir)
                is_below = folder.is_relative_to(Path.cwd())
                # Reports, logs and commands repeat it.
                cfg.paths.run = str(folder.relative_to(Path.cwd()) if is_below else folder)
                run(cfg)
                if is_first_process():
                    runs.finish(folder)
        except Exception as error:
            if not self._tell(error):
                raise

    def _announce(self, cfg: DictConfig) -> None:
        from specheads.commands import plan  # it imports torch

        with contextlib.suppress(UserError):  # what cannot be planned says why when it is loaded
            plan.announce(plan.plan_of(self.verb, cfg))

    def _tell(self, error: Exception) -> bool:
        """Print the message of a user's mistake; return whether it is one."""
        message = user_error(error) or composition_error(error, self.name, sys.argv[1:])
        if message is None:
            return False
        self.failed = True
        where = ""
        with contextlib.suppress(UserError):  # the launcher's variables may be this mistake
            processes = Processes.this()
            if not processes.is_first:
                where = f" in process {processes.rank} on {socket.gethostname()}"
        print(f"error{where}: {message}", file=sys.stderr)
        if path := log_file():
            print(f"log: {without_home(str(path))}", file=sys.stderr)
        return True


def _options_first(words: Sequence[str]) -> list[str]:
    """Return the words in the order that Hydra's parser needs: it reads no overrides after an
    option that follows others.
    """

    def is_override(word: str) -> bool:
        return word[:1] != "-" and ("=" in word or word[:1] == "~")

    return sorted(words, key=is_override)


def _take_gpu() -> None:
    """Give each process that a launcher has started another GPU."""
    processes = Processes.this()
    if processes.launcher is not None:
        import torch  # slow, and not every command needs it

        if processes.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(processes.local_rank)


def _resumed_by(interruption: interrupts.Interrupted) -> str:
    if not taken:
        return str(interruption)
    again = "the same command" if may_resume() else "the same command without resume=false"
    return f"{interruption}; {again} resumes it"


def log_file() -> Path | None:
    """Return the file with all messages of this run."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and taken:
            path = Path(handler.baseFilename)
            return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return None


def print_log() -> None:
    """Print where the log of this run is, if it has one."""
    if path := log_file():
        print(f"log: {without_home(str(path))}")


def next_command(verb: str, *overrides: str) -> str:
    """Return the command line that follows this one, with its folder of configs, and its overrides
    that both commands share.
    """
    given: list[str] = []
    words = ["specheads", verb]
    if HydraConfig.initialized():
        hydra_cfg = HydraConfig.get()
        given = hydra_cfg.overrides.task
        for source in hydra_cfg.runtime.config_sources:
            if source.provider == "command-line":
                words += ["--config-dir", os.path.relpath(source.path)]
    shared = _OF_DECODERS if verb == "generate" else _SHARED_KEYS
    replaced = {override.split("=")[0] for override in overrides}
    for override in given:
        key = override.lstrip("+").split("=")[0]
        if key.split(".")[0] in shared and key not in replaced:
            words.append(override)
    return shlex.join([*words, *overrides])


def overrides_of(words: Sequence[str]) -> list[str]:
    """Return the overrides among the words of a command line, for composing its config.

    A folder of configs is one of them.
    """
    options = ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--config-dir", "-cd")
    given, others = options.parse_known_args(words)
    overrides = [word for word in others if "=" in word and not word.startswith("-")]
    if given.config_dir:
        overrides.append(f"hydra.searchpath=['file://{Path(given.config_dir).resolve()}']")
    return overrides


def configs_of(name: str, words: Sequence[str]) -> Iterator[DictConfig]:
    """Yield the config of a command line, or of each job of its sweep; none where Hydra only prints
    something. Raises Hydra's errors.
    """
    options = {word for word in words if word.startswith("-")}
    if not options <= {"-m", "--multirun", "-cd", "--config-dir"}:
        return
    overrides = overrides_of(words)
    jobs = [overrides]
    if options & {"-m", "--multirun"}:
        parsed = OverridesParser.create().parse_overrides(overrides)
        (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    for job in jobs:
        cfg = command_config(name, job)
        cfg.paths.run = ""  # only a run knows its folder
        yield cfg


class NoteRunKey(Callback):
    """Hydra callback that notes the key of the configuration, or of the whole sweep, before this
    process runs anything.
    """

    key = ""
    resume = True

    def on_run_start(self, config: DictConfig, **kwargs: object) -> None:
        """Note the key of a run; let the first process alone write files."""
        self.on_multirun_start(config)
        if not is_first_process():
            with read_write(config), open_dict(config):
                config.hydra.output_subdir = None
                config.hydra.job_logging.root.handlers = ["warnings"]
                config.hydra.job_logging.handlers.pop("file", None)

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        NoteRunKey.key = run_key(config)
        NoteRunKey.resume = config.resume

    def on_job_start(self, config: DictConfig, **kwargs: object) -> None:
        if config.hydra.output_subdir is not None:
            folder = Path(config.hydra.runtime.output_dir, config.hydra.output_subdir)
            for path in folder.glob("*.yaml"):
                path.write_text(without_home(path.read_text()))


def may_resume() -> bool:
    """Whether the run of this process may resume an interrupted run."""
    # What the launcher restarts, it has started.
    return NoteRunKey.resume is not False or Processes.this().restarts > 0


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


def run_key(config: DictConfig) -> str:
    """Return a key of a composed configuration.

    It does not depend on Hydra's folders, on `resume`, or on where it computes.
    """
    settings = cast(dict[str, object], OmegaConf.to_container(config, resolve=False))
    hydra_node = cast(dict[str, dict[str, list[str]]], settings.pop("hydra"))
    for key in _IGNORED:
        settings.pop(key, None)
    trainer = settings.get("trainer")
    if isinstance(trainer, dict):
        settings["trainer"] = {name: value for name, value in trainer.items() if name not in _WHERE}
    kept = []
    for override in sorted(hydra_node["overrides"]["task"]):
        if override.lstrip("+~").split("=")[0] not in _IGNORED:
            kept.append(override)
    text = json.dumps([settings, kept], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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


class LogFile(logging.FileHandler):
    """A log file. A line that a full disk does not take is left out: the work that follows tells
    what fails.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class WithoutHome(logging.Formatter):
    """A formatter that writes `~` for the user's home folder: logs are shown to others."""

    def format(self, record: logging.LogRecord) -> str:
        return without_home(super().format(record))
