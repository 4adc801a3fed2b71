"""Entry points: compose a Hydra config, run, and turn a user's mistakes into one message and exit code 2."""

import functools
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from specheads.errors import UserError
from specheads.pair import config_folder

EXIT_USER_ERROR = 2


def command(config_name: str) -> Callable[[Callable[[DictConfig], object]], Callable[[], None]]:
    """Return a decorator that makes `run(cfg)` a command line whose config is conf/<config_name>.yaml."""

    def decorate(run: Callable[[DictConfig], object]) -> Callable[[], None]:
        @functools.wraps(run)
        def job(cfg: DictConfig) -> None:
            try:
                run(cfg)
            except Exception as error:
                # hydra.utils.instantiate wraps what a constructor raises
                user_error = _user_error(error)
                if user_error is None:
                    raise
                fail(str(user_error))

        hydra_main = hydra.main(version_base="1.3", config_path=str(config_folder().resolve()), config_name=config_name)(job)

        @functools.wraps(run)
        def entry() -> None:
            os.environ["HYDRA_FULL_ERROR"] = "1"  # lets composition errors through to here
            try:
                hydra_main()
            except (HydraException, OmegaConfBaseException) as error:
                fail(str(error))

        return entry

    return decorate


def _user_error(error: BaseException | None) -> UserError | None:
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__
    return error


def fail(message: str) -> NoReturn:
    """Print a message for the user and leave with exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(EXIT_USER_ERROR)
