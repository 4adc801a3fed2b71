"""The stages of a data set in a number of processes on the machines of a Ray cluster.

Ray starts the workers and places them by the CPUs and GPUs that each needs. This process, the driver, gives each worker that has
begun one lot of shards after another, so workers join as the cluster grows. What a worker that dies was making is made by another
one. A driver that dies ends its workers, and the same command makes what is missing.
"""

import importlib
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from data_gen.run import Stage
from data_gen.settings import Generation
from specheads.errors import UserError, user_error
from specheads.forecast import progress
from specheads.storage.files import locked

logger = logging.getLogger(__name__)

_SECONDS_TO_CONNECT = 5.0
_SECONDS_TO_START = 30.0  # without a worker that has begun, after which the log says what the cluster has
_MOST_DEATHS = 20  # of workers, one after another, without a lot that is finished
_PASSED_ON = ("HF_", "HUGGINGFACE_", "SPECHEADS_", "VLLM_", "PYTHONPATH")  # beginnings of names of environment variables
PACKAGES = ("specheads", "torch", "transformers")  # that decide the bytes of what a worker makes

T = TypeVar("T")
OpenStage = Callable[[dict[str, Any]], Path | Stage]
Lot = tuple[list[str], int]  # names of shards, and the number of their responses


class UnfitWorker(UserError):
    """A worker that cannot take part, and whose like cannot either."""


def on_workers(settings: Generation, shared: Path, open_stage: OpenStage, stages: Sequence[dict[str, Any]]) -> str:
    """Do stages one after another in up to `settings.ray_num_workers` processes; return the folder of the last.

    Args:
        shared: a folder that all machines share, in which the data is.
        open_stage: a function of a module, which returns a stage, or its folder where it is done.
        stages: the argument of `open_stage` for each stage, plain data.

    Raises:
        UserError: no Ray here or at the address, too small a cluster, workers with other versions or without the folder, or a
            mistake that every worker met.
    """
    ray = _ray()
    shared.mkdir(parents=True, exist_ok=True)
    _connect(ray, settings)
    sign = shared.absolute() / f".ray-{secrets.token_hex(4)}"
    sign.touch()
    try:
        check = {"sign": str(sign), "packages": packages_here(), "host": socket.gethostname(), "folder": os.getcwd()}
        needs = {"num_cpus": settings.ray_cpus_per_worker, "num_gpus": settings.ray_gpus_per_worker}
        _check_size(ray, settings, needs)
        remote = ray.remote(Worker).options(**needs, scheduling_strategy="SPREAD")
        logger.info(
            "ray: %d workers, each with %g CPUs and %g GPUs, begin as soon as the cluster has room for them",
            *(settings.ray_num_workers, needs["num_cpus"], needs["num_gpus"]),
        )
        for stage in stages:
            folder = Driver(ray, partial(remote.remote, open_stage, stage, check)).run(settings.ray_num_workers)
        return folder
    finally:
        sign.unlink(missing_ok=True)
        ray.shutdown()


class Worker:
    """A process of the cluster that makes lots of a stage."""

    def __init__(self, open_stage: OpenStage, argument: dict[str, Any], check: Mapping[str, Any]) -> None:
        self._open_stage, self._argument, self._check = open_stage, argument, check

    def begin(self) -> None:
        """Open the stage. Raises UnfitWorker if this machine cannot take part."""
        _check_worker(self._check)
        if Path(self._check["folder"]).is_dir():
            os.chdir(self._check["folder"])  # for relative paths of models and prompts
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        self.stage = _with_host(lambda: self._open_stage(self._argument))

    def folder(self) -> str:
        """Return the folder of the stage."""
        return str(self.stage.store.folder if isinstance(self.stage, Stage) else self.stage)

    def missing(self) -> tuple[str, list[Lot]]:
        """Return the stage's name, and the lots that are missing."""
        if not isinstance(self.stage, Stage):
            return "", []
        logging.getLogger().setLevel(logging.INFO)  # this one speaks for all
        stage = self.stage
        missing = stage.store.still_missing(list(stage.shards))
        stage.announced(missing)
        return stage.name, [(lot, stage.num_rows(lot)) for lot in stage.lots(missing) if lot]

    def make(self, lot: list[str]) -> None:
        """Make the shards of a lot that are missing."""
        if isinstance(stage := self.stage, Stage):
            _with_host(lambda: stage.make(stage.store.still_missing(lot), lambda *counts: None))  # the driver shows progress

    def complete(self) -> None:
        """Declare the cache complete, all of whose shards exist."""
        if isinstance(stage := self.stage, Stage) and not stage.store.still_missing(list(stage.shards)):
            stage.store.complete(list(stage.shards))


class Driver:
    """Gives the lots of a stage to workers."""

    def __init__(self, ray: Any, new_worker: Callable[[], Any]) -> None:
        self.ray, self.new_worker = ray, new_worker
        self.calls: dict[Any, tuple[Any, Lot | None]] = {}  # the worker of each call, and its lot, None while it begins
        self.ready: list[Any] = []  # workers that have begun and have no lot
        self.left: deque[Lot] = deque()
        self.errors: list[UserError] = []
        self.deaths, self.said = 0, False

    def run(self, count: int) -> str:
        """Let `count` workers begin, and make all lots; return the folder of the stage. Raises the first error if all fail."""
        for _ in range(count):
            self._begin()
        folder = self._ask("folder")
        with locked(Path(folder)):
            name, lots = self._ask("missing")
            self.left.extend(lots)
            if lots:
                with progress(name, sum(rows for _, rows in lots)) as advance:
                    while self.left or any(lot for _, lot in self.calls.values()):
                        while self.left and self.ready:
                            worker, lot = self.ready.pop(), self.left.popleft()
                            self.calls[worker.make.remote(lot[0])] = worker, lot
                        advance(self._wait())
                self._ask("complete")
        for worker in (*self.ready, *(worker for worker, _ in self.calls.values())):
            self.ray.kill(worker)
        return folder

    def _begin(self) -> None:
        worker = self.new_worker()
        self.calls[worker.begin.remote()] = worker, None

    def _ask(self, method: str) -> Any:
        """Return what a method of some worker returns."""
        while True:
            while not self.ready:
                self._wait()
            try:
                return self.ray.get(getattr(self.ready[0], method).remote())
            except self.ray.exceptions.RayActorError as error:
                self.ready.pop(0)
                self._lost(None, error)

    def _wait(self) -> int:
        """Wait until a worker has begun, or has made a lot; return the number of responses that were made."""
        done, _ = self.ray.wait(list(self.calls), timeout=None if self.said else _SECONDS_TO_START)
        if not done and not self.ready:
            has, free = self.ray.cluster_resources(), self.ray.available_resources()
            logger.info(
                "ray: the cluster has %g CPUs (%g free) and %g GPUs (%g free)",
                *(table.get(name, 0) for name in ("CPU", "GPU") for table in (has, free)),
            )
            self.said = True
        rows = 0
        for call in done:
            worker, lot = self.calls.pop(call)
            try:
                self.ray.get(call)
            except self.ray.exceptions.RayActorError as error:
                self._lost(lot, error)
            except self.ray.exceptions.RayTaskError as error:
                self._failed(worker, lot, error.cause)
            else:
                self.ready.append(worker)
                rows += lot[1] if lot else 0
                self.deaths, self.said = 0 if lot else self.deaths, True
        return rows

    def _lost(self, lot: Lot | None, error: Exception) -> None:
        """Let another worker begin in place of one that has died."""
        self.deaths += 1
        if self.deaths > _MOST_DEATHS:
            raise error
        logger.warning("ray: a worker has died, and another one begins")
        if lot:
            self.left.appendleft(lot)
        self._begin()

    def _failed(self, worker: Any, lot: Lot | None, cause: BaseException) -> None:
        """Go on without a worker that has met a mistake. Raises it if it was the last, or if others would meet it, too."""
        if isinstance(cause, UnfitWorker) or not (tell := user_error(cause)):
            raise cause from None
        self.errors.append(tell)
        self.ray.kill(worker)
        if lot:
            self.left.appendleft(lot)
        if not self.calls and not self.ready:
            raise self.errors[0]
        logger.warning("ray: a worker has ended, the others go on: %s", tell)


def packages_here() -> dict[str, str]:
    """Return the versions of the packages that decide the bytes of what this process makes."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "of a source tree"
    return versions


def _ray() -> Any:
    """Return the module. Raises UserError without one."""
    try:
        return importlib.import_module("ray")  # whose annotations do not know how its functions are called
    except ImportError:
        raise UserError("runner=ray, but there is no Ray here; run pip install 'specheads[ray]'.") from None


def _connect(ray: Any, settings: Generation) -> None:
    """Connect to the cluster of the settings, or start one of this machine alone."""
    passed_on = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
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
            socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
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


def _check_worker(check: Mapping[str, Any]) -> None:
    """Raise UnfitWorker if this process has other versions than the driver, or does not see its folder."""
    host, ours = socket.gethostname(), packages_here()
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


def _with_host(call: Callable[[], T]) -> T:
    """Return what a call returns; the message of a user's mistake gets the name of this machine."""
    try:
        return call()
    except Exception as error:
        tell = user_error(error)
        if tell is None:
            raise
        raise type(tell)(f"{socket.gethostname()}: {tell}") from None
