"""The same work in a number of processes on the machines of a Ray cluster.

Ray starts the workers, places them by the CPUs and GPUs that each needs, and starts another one where one dies. It does not hand
out shards: workers take them by leases, like any processes with a shared folder. So one more worker may join whenever the cluster
has grown, processes outside the cluster help, and a run that ends in the middle, the driver's included, resumes like any other.
"""

import contextlib
import importlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from data_gen.settings import Generation
from specheads.errors import UserError, user_error
from specheads.storage.leases import packages_here

logger = logging.getLogger(__name__)

SECONDS_TO_CONNECT = 5.0
SECONDS_TO_START = 30.0  # without a worker that has begun, after which the log says what the cluster has
SIGN, SECONDS_OF_A_SIGN = ".ray-", 24 * 3600.0
PASSED_ON = ("HF_", "HUGGINGFACE_", "SPECHEADS_", "VLLM_", "PYTHONPATH")  # beginnings of names of environment variables

TASK: dict[str, Any] = {"max_retries": -1, "max_calls": 1, "scheduling_strategy": "SPREAD"}  # a worker that dies is started again

R = TypeVar("R")


class UnfitWorker(UserError):
    """A worker that cannot take part, and whose like cannot either."""


def on_workers(settings: Generation, shared: Path, make: Callable[[dict[str, Any]], R], argument: dict[str, Any]) -> R:
    """Call `make(argument)` in `settings.ray_num_workers` processes; return what the first of them returns.

    Args:
        shared: the folder in which they share their work.
        make: a function of a module; it returns when the work is done, whoever did it.
        argument: plain data.

    Raises:
        UserError: no Ray here or at the address, too small a cluster, workers with other versions or without the folder, or a
            mistake that every worker met.
    """
    ray = _ray()
    shared.mkdir(parents=True, exist_ok=True)
    _connect(ray, settings)
    sign = new_sign(shared.absolute())
    try:
        check = {"sign": str(sign), "packages": packages_here(), "host": socket.gethostname(), "folder": os.getcwd()}
        needs = {"num_cpus": settings.ray_cpus_per_worker, "num_gpus": settings.ray_gpus_per_worker}
        _check_size(ray, settings, needs)
        task = ray.remote(**needs, **TASK)(_worker)
        tasks = [task.remote(make, argument, number, check) for number in range(settings.ray_num_workers)]
        logger.info(
            "ray: %d workers, each with %g CPUs and %g GPUs, begin as soon as the cluster has room for them",
            *(len(tasks), needs["num_cpus"], needs["num_gpus"]),
        )
        return _first_result(ray, tasks)
    finally:
        sign.unlink(missing_ok=True)
        ray.shutdown()


def new_sign(shared: Path) -> Path:
    """Make a file by which workers see that they share the folder; remove those of drivers that were killed long ago."""
    sign = shared / f"{SIGN}{secrets.token_hex(4)}"
    sign.touch()
    made = sign.stat().st_mtime  # by the clock of the file system, which made the others, too
    for other in shared.glob(f"{SIGN}*"):
        with contextlib.suppress(FileNotFoundError):
            if made - other.stat().st_mtime > SECONDS_OF_A_SIGN:
                other.unlink()
    return sign


def _ray() -> Any:
    """Return the module. Raises UserError without one."""
    try:
        return importlib.import_module("ray")  # whose annotations do not know how its functions are called
    except ImportError:
        raise UserError("runner=ray, but there is no Ray here; run pip install 'specheads[ray]'.") from None


def _connect(ray: Any, settings: Generation) -> None:
    """Connect to the cluster of the settings, or start one of this machine alone."""
    passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    options: dict[str, Any] = {"runtime_env": {"env_vars": passed_on}, "logging_level": "warning", "log_to_driver": True}
    if settings.ray_address is None:
        options |= {"include_dashboard": False}
    try:
        _check_listens(settings.ray_address)
        ray.init(address=settings.ray_address or "local", **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"ray.address={settings.ray_address} cannot be reached ({(str(error).splitlines() or [''])[0]}); start a cluster "
            "there (ray start --head, ray up), use ray.address=auto on one of its machines, or leave it out for this machine."
        ) from None


def _check_listens(address: str | None) -> None:
    """Raise ConnectionError if nobody listens at an address, which Ray would try for minutes."""
    host, _, port = (address or "").rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), SECONDS_TO_CONNECT).close()
        except OSError as error:
            raise ConnectionError(error.strerror or str(error)) from None


def _check_size(ray: Any, settings: Generation, needs: Mapping[str, float]) -> None:
    """Raise UserError if no worker fits into a cluster that cannot grow, which is that of this machine alone."""
    has = ray.cluster_resources()
    for name, need, key in (("CPU", needs["num_cpus"], "cpus"), ("GPU", needs["num_gpus"], "gpus")):
        if settings.ray_address is None and need > has.get(name, 0):
            raise UserError(
                f"ray.{key}_per_worker={need:g}, but this machine has {has.get(name, 0):g} {name}s; give fewer, or the address "
                "of a cluster with more: ray.address="
            )


def _first_result(ray: Any, tasks: list[Any]) -> Any:
    """Return the first result; all work is done then. Raises the first error if all workers fail, or if one is unfit."""
    errors: list[BaseException] = []
    left, said = list(tasks), False
    while left:
        done, left = ray.wait(left, timeout=None if said else SECONDS_TO_START)
        if not done:
            said = True
            has, free = ray.cluster_resources(), ray.available_resources()
            logger.info(
                "ray: the cluster has %g CPUs (%g free) and %g GPUs (%g free)",
                *(table.get(name, 0) for name in ("CPU", "GPU") for table in (has, free)),
            )
        for each in done:
            try:
                return ray.get(each)
            except ray.exceptions.RayError as error:
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                if isinstance(cause, UnfitWorker) or not (tell := user_error(cause)):
                    raise cause from None
                errors.append(tell)
                logger.warning("ray: a worker has ended, the others go on: %s", tell)
    raise errors[0]


def _worker(make: Callable[[dict[str, Any]], R], argument: dict[str, Any], number: int, check: Mapping[str, Any]) -> R:
    """Do the work of one worker; the first one logs its progress."""
    host = socket.gethostname()
    ours = packages_here()
    different = {name: version for name, version in check["packages"].items() if ours[name] != version}
    if different:
        raise UnfitWorker(
            f"the worker on {host} has {', '.join(f'{name} {ours[name]}' for name in different)}, {check['host']} has "
            f"{', '.join(f'{name} {version}' for name, version in different.items())}; install the same versions on all machines."
        )
    if not Path(check["sign"]).is_file():
        raise UnfitWorker(
            f"the worker on {host} does not see {Path(check['sign']).parent} of {check['host']}; give a folder that all machines "
            "share: paths.data="
        )
    if Path(check["folder"]).is_dir():
        os.chdir(check["folder"])  # for relative paths of models and prompts
    logging.basicConfig(level=logging.INFO if number == 0 else logging.WARNING, format="%(message)s")
    try:
        return make(argument)
    except Exception as error:
        tell = user_error(error)
        if tell is None:
            raise
        raise type(tell)(f"{host}: {tell}") from None
