"""Entry points: compose a Hydra config, run, and turn a user's mistakes into one message and exit code 2."""

import functools
import os
import sys
from collections.abc import Callable

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specheads.errors import UserError
from specheads.pair import Pair, config_folder, load_pair

EXIT_USER_ERROR = 2


def command(config_name: str) -> Callable[[Callable[[DictConfig], object]], Callable[[], None]]:
    """Return a decorator that makes `run(cfg)` a command line whose config is conf/<config_name>.yaml."""

    def decorate(run: Callable[[DictConfig], object]) -> Callable[[], None]:
        failed = []

        @functools.wraps(run)
        def job(cfg: DictConfig) -> None:
            try:
                run(cfg)
            except Exception as error:
                user_error = _user_error(error)
                if user_error is None:
                    raise
                tell(user_error)
                failed.append(cfg)  # the other jobs of a sweep go on

        hydra_main = hydra.main(version_base="1.3", config_path=str(config_folder().resolve()), config_name=config_name)(job)

        @functools.wraps(run)
        def entry() -> None:
            os.environ["HYDRA_FULL_ERROR"] = "1"  # lets composition errors through to here
            try:
                hydra_main()
            except (HydraException, OmegaConfBaseException) as error:
                tell(error)
                failed.append(None)
            if failed:
                raise SystemExit(EXIT_USER_ERROR)

        return entry

    return decorate


def load_configured_pair(cfg: DictConfig) -> Pair:
    """Return the pair that `cfg.model` describes."""
    return load_pair(**OmegaConf.to_container(cfg.model, resolve=True, throw_on_missing=True))


def _user_error(error: BaseException | None) -> UserError | None:
    """Return the UserError behind an exception: hydra.utils.instantiate wraps what a constructor raises."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__
    return error


def tell(error: Exception) -> None:
    """Print an error for the user."""
    print(f"error: {error}", file=sys.stderr)
