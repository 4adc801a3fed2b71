"""Entry points: compose a Hydra config, run, and turn a user's mistakes into one message and exit code 2.

Whatever the machine refuses (no space, no memory, a folder that cannot be written) is such a message too; Ctrl-C and
SIGTERM end a run in order, and the same command goes on with it.
"""

import functools
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specheads import interrupts
from specheads.commands.help import help_text
from specheads.commands.run_folders import NoteRunKey, may_resume, register_resolver
from specheads.errors import UserError, user_error
from specheads.pair import NewDraft, Pair, config_folder, load_pair
from specheads.storage import runs

EXIT_USER_ERROR = 2
# How a launcher is known, and where it says how many processes it has started.
LAUNCHERS = {"torchrun": ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"), "srun": ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")}
SHARED_KEYS = ("model", "data", "warp", "generation", "paths", "seed")  # what a head and its evaluation must have in common


def command(config_name: str) -> Callable[[Callable[[DictConfig], object]], Callable[[], None]]:
    """Return a decorator that makes `run(cfg)` a command line whose config is conf/<config_name>.yaml."""

    def decorate(run: Callable[[DictConfig], object]) -> Callable[[], None]:
        failed, begun = [], []

        def job(cfg: DictConfig) -> None:
            try:
                check_launcher(os.environ)
                check_resume(cfg)
                hydra_cfg = HydraConfig.get()
                sweeping = hydra_cfg.mode == RunMode.MULTIRUN
                folder = Path(hydra_cfg.runtime.output_dir)
                top = Path(hydra_cfg.sweep.dir) if sweeping else folder
                if is_first_process():
                    if top not in begun:
                        runs.begin(top, NoteRunKey.key, may_resume())
                        begun.append(top)
                    if sweeping and not runs.begin_job(top, folder):
                        return
                run(cfg)
                if is_first_process():
                    runs.finish(folder)
            except Exception as error:
                message = user_error(error)
                if message is None:
                    raise
                tell(message)
                failed.append(cfg)  # the other jobs of a sweep go on

        entry = hydra.main(version_base="1.3", config_path=str(config_folder().resolve()), config_name=config_name)(
            functools.wraps(run)(job)
        )

        @functools.wraps(run)
        def main() -> None:
            failed.clear()
            begun.clear()
            os.environ["HYDRA_FULL_ERROR"] = "1"  # lets composition errors through to here
            register_resolver()
            interrupts.listen()
            try:
                if {"--help", "-h"} & set(sys.argv):
                    print(help_text(config_name, [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]))
                    return
                entry()
            except interrupts.Interrupted as interruption:
                if not is_first_process():
                    raise SystemExit(0) from None  # the first one speaks for all
                again = "the same command" if may_resume() else "the same command without resume=false"
                print(f"{interruption}; {again} goes on from what was finished" if begun else str(interruption), file=sys.stderr)
                raise SystemExit(interruption.exit_code) from None
            except (HydraException, OmegaConfBaseException) as error:
                tell(user_error(error) or error)
                failed.append(None)
            except ValueError as error:
                nulls = [word.removesuffix("=null") for word in sys.argv[1:] if word.endswith("=null")]
                groups = [name for name in nulls if (config_folder() / name).is_dir()]
                if "Config group override" not in str(error) or not groups:
                    raise
                tell(UserError(f"{groups[0]}=null: a group of configs cannot be null; write '~{groups[0]}' to leave it out."))
                failed.append(None)
            except OSError as error:  # Hydra cannot make the run's folder
                message = user_error(error)
                if message is None:
                    raise
                tell(message)
                failed.append(None)
            if failed:
                raise SystemExit(EXIT_USER_ERROR)
            for top in begun:
                runs.finish(top)

        return main

    return decorate


def check_launcher(environment: Mapping[str, str]) -> None:
    """Raise UserError if a launcher has started this command several times: each would take a run folder of its own."""
    for launcher, (sign, count) in LAUNCHERS.items():
        if sign in environment and environment.get(count, "1") != "1":
            raise UserError(
                f"{launcher} has started {environment[count]} processes of this command; start it once, with plain python: "
                "trainer.devices= says how many GPUs train a head, and it starts a process for each itself."
            )


def check_resume(cfg: DictConfig) -> None:
    """Raise UserError for a `resume` that this command does not know."""
    takes_checkpoint = "checkpoint" in cfg
    if not isinstance(cfg.resume, bool) and not (takes_checkpoint and isinstance(cfg.resume, str) and Path(cfg.resume).is_file()):
        checkpoint = " or a checkpoint such as outputs/head/<date_time>/checkpoints/last.ckpt" if takes_checkpoint else ""
        missing = " is no file;" if takes_checkpoint and isinstance(cfg.resume, str) else ":"
        raise UserError(f"resume={cfg.resume}{missing} expected true, false{checkpoint}.")


def is_first_process() -> bool:
    """Whether this is the process of a distributed run that writes for all."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK"))


def next_command(script: str, *words: str) -> str:
    """Return the command line that goes on from this one: with its overrides of what both commands share."""
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    given = {word.split("=")[0] for word in words}
    keys = [each.lstrip("+").split("=")[0] for each in overrides]
    kept = [each for key, each in zip(keys, overrides, strict=True) if key.split(".")[0] in SHARED_KEYS and key not in given]
    return shlex.join(["python", *script.split(), *kept, *words])


def load_configured_pair(cfg: DictConfig, only_draft: bool = False, new_draft: NewDraft | None = None) -> Pair:
    """Return the pair that `cfg.model` describes, with or without the target's weights, with the draft that it names or a new one."""
    keys = OmegaConf.to_container(cfg.model, resolve=True, throw_on_missing=True)
    return load_pair(only_draft=only_draft, new_draft=new_draft, **keys)


def tell(error: Exception) -> None:
    """Print an error for the user, Hydra's with its reason."""
    reason = f"\n{error.__cause__}" if isinstance(error, HydraException) and error.__cause__ else ""
    print(f"error: {error}{reason}", file=sys.stderr)
