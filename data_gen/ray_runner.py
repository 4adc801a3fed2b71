"""The stages of a data set in a number of processes on the machines of a Ray cluster.

This process, the driver, gives each worker that has begun one lot of shards after another, so
workers join as the cluster grows. What a worker that dies was making is made by another one.
"""

import importlib
import logging
import os
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict, TypeVar, cast

from specheads.data_gen.run import Stage
from specheads.data_gen.settings import DataGeneration
from specheads.errors import UserError, user_error
from specheads.progress import progress
from specheads.storage.files import locked

logger = logging.getLogger(__name__)

_SECONDS_TO_CONNECT = 5.0
_MOST_DEATHS = 20  # workers that may die one after another without a finished lot
# Beginnings of names of environment variables
_PASSED_ON = "HF_", "HUGGINGFACE_", "SPECHEADS_", "VLLM_", "PYTHONPATH"

T = TypeVar("T")
OpenStage = Callable[[dict[str, object]], Path | Stage]
Actor = Any  # Ray makes the class of a worker's handle


class _Driver(TypedDict):
    """What workers compare with what they have and see."""

    sign: str  # a file in the shared folder
    packages: dict[str, str]
    host: str
    folder: str


def on_workers(
    settings: DataGeneration,
    shared: Path,
    open_stage: OpenStage,
    stages: Sequence[dict[str, object]],
) -> str:
    """Do stages one after another on workers that share the folder `shared`.

    Return the folder of the last.

    `open_stage`, a function of a module, opens a stage from plain data. Raises UserError for a
    cluster that cannot be used.
    """
    try:
        # Its annotations do not know how its functions are called
        ray = importlib.import_module("ray")
    except ImportError:
        raise UserError(
            "runner=ray, but there is no Ray here; run pip install 'specheads[ray]'."
        ) from None
    shared.mkdir(parents=True, exist_ok=True)
    _connect(ray, settings)
    needs = {"num_cpus": settings.ray_cpus_per_worker, "num_gpus": settings.ray_gpus_per_worker}
    try:
        _check_size(ray.cluster_resources(), settings)
        remote = ray.remote(_Worker).options(**needs, scheduling_strategy="SPREAD")
        logger.info(
            "ray: %d workers, each with %g CPUs and %g GPUs, begin as soon as the cluster has room"
            " for them",
            *(settings.ray_num_workers, *needs.values()),
        )
        with tempfile.NamedTemporaryFile(dir=shared.absolute(), prefix=".ray-") as sign:
            check: _Driver = {
                "sign": sign.name,
                "packages": _packages_here(),
                "host": socket.gethostname(),
                "folder": os.getcwd(),
            }
            for stage in stages:
                folder = _Crew(
                    ray, partial(remote.remote, open_stage, stage, check), settings.ray_num_workers
                ).make_stage()
        return folder
    finally:
        ray.shutdown()


class _Worker:
    """A process of the cluster that makes lots of a stage."""

    def __init__(self, open_stage: OpenStage, argument: dict[str, object], check: _Driver) -> None:
        self._open_stage = open_stage
        self._argument = argument
        self._check = check

    def begin(self) -> None:
        _check_worker(self._check)
        if Path(self._check["folder"]).is_dir():
            os.chdir(self._check["folder"])  # relative paths of models and prompts begin there
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        self.stage = _with_host(lambda: self._open_stage(self._argument))

    def folder(self) -> str:
        return str(self.stage.store.folder if isinstance(self.stage, Stage) else self.stage)

    def missing(self) -> tuple[str, int, list[list[str]]]:
        """Return the stage's name, the number of the missing responses, and the lots that are
        missing.
        """
        if not isinstance(stage := self.stage, Stage):
            return "", 0, []
        logging.getLogger().setLevel(logging.INFO)  # this one speaks for all
        missing = stage.store.still_missing(list(stage.shards))
        stage.announce(missing)
        return stage.name, stage.num_rows(missing), stage.lots(missing)

    def make(self, lot: list[str]) -> int:
        """Make the shards of a lot that are missing; return the number of the lot's responses."""
        stage = cast(Stage, self.stage)
        # The driver shows progress
        _with_host(lambda: stage.make(stage.store.still_missing(lot), lambda *done: None))
        stage.check_left_out()
        return stage.num_rows(lot)

    def complete(self) -> None:
        if isinstance(stage := self.stage, Stage) and not stage.store.still_missing(
            list(stage.shards)
        ):
            stage.complete()


class _Crew:
    """The workers of one stage. Another one begins in place of one that dies."""

    def __init__(self, ray: ModuleType, new_worker: Callable[[], Actor], count: int) -> None:
        self._ray = ray
        self._new_worker = new_worker
        self._calls: dict[
            object, tuple[Actor, tuple]
        ] = {}  # the worker of each call, and its task: empty while the worker begins
        self._idle: list[Actor] = []
        self._deaths = 0
        for _ in range(count):
            self._begin()

    def make_stage(self) -> str:
        (folder,) = self._do([("folder",)])
        with locked(Path(folder)):
            ((name, num_rows, lots),) = self._do([("missing",)])
            if lots:
                with progress(name, num_rows) as advance:
                    for rows in self._do(("make", lot) for lot in lots):
                        advance(rows)
            list(self._do([("complete",)]))
        for worker in (*self._idle, *(worker for worker, _ in self._calls.values())):
            self._ray.kill(worker)
        return folder

    def _begin(self) -> None:
        worker = self._new_worker()
        self._calls[worker.begin.remote()] = worker, ()

    def _do(self, tasks: Iterable[tuple]) -> Iterator[Any]:
        """Yield what workers return for tasks, (name of a method, arguments), as they end.

        Raises a worker's first mistake.
        """
        left = deque(tasks)
        while left or any(task for _, task in self._calls.values()):
            while left and self._idle:
                worker = self._idle.pop()
                task = left.popleft()
                self._calls[getattr(worker, task[0]).remote(*task[1:])] = worker, task
            (call,), _ = self._ray.wait(list(self._calls))
            worker, task = self._calls.pop(call)
            try:
                result = self._ray.get(call)
            except self._ray.exceptions.RayActorError:
                self._deaths += 1
                if self._deaths > _MOST_DEATHS:
                    raise
                logger.warning("ray: a worker has died, and another one begins")
                left.extendleft([task] if task else [])
                self._begin()
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause from None
            else:
                self._idle.append(worker)
                if task:
                    self._deaths = 0
                    yield result


def _packages_here() -> dict[str, str]:
    """Return the versions of the packages that decide the bytes of what this process makes."""
    versions = {}
    for name in ("specheads", "torch", "transformers"):
        versions[name] = importlib.import_module(name).__version__
    return versions


def _connect(ray: ModuleType, settings: DataGeneration) -> None:
    """Connect to the cluster of the settings, or start one of this machine alone."""
    passed_on = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    options: dict[str, object] = {
        "runtime_env": {"env_vars": passed_on},
        "logging_level": "warning",
        "log_to_driver": True,
    }
    if (address := settings.ray_address) is None:
        options |= {"include_dashboard": False}
    try:
        host, _, port = (address or "").rpartition("://")[2].rpartition(":")
        if host and port.isdecimal():  # an address where nobody listens, Ray would try for minutes
            socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
        ray.init(address=address or "local", **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or (str(error).splitlines() or [""])[0]
        raise UserError(
            f"ray.address={address} cannot be reached ({reason}); start a cluster there, use"
            " ray.address=auto on one of its machines, or leave it out for this machine."
        ) from None


def _check_size(has: Mapping[str, float], settings: DataGeneration) -> None:
    """Raise UserError if no worker fits into a cluster that cannot grow, which is that of this
    machine alone.
    """
    for name, need, key in (
        ("CPU", settings.ray_cpus_per_worker, "cpus"),
        ("GPU", settings.ray_gpus_per_worker, "gpus"),
    ):
        if settings.ray_address is None and need > has.get(name, 0):
            raise UserError(
                f"ray.{key}_per_worker={need:g}, but this machine has {has.get(name, 0):g} {name}s;"
                " give fewer, or the address of a cluster with more: ray.address="
            )


def _check_worker(check: _Driver) -> None:
    """Raise UserError if this process has other versions than the driver, or does not see its
    folder.
    """
    host = socket.gethostname()
    ours = _packages_here()
    if ours != check["packages"]:
        raise UserError(
            f"the worker on {host} has {ours}, {check['host']} has {check['packages']}; install the"
            " same versions on all machines."
        )
    if not Path(check["sign"]).is_file():
        raise UserError(
            f"the worker on {host} does not see {Path(check['sign']).parent} of {check['host']};"
            " give a folder that all machines share: paths.data="
        )


def _with_host(call: Callable[[], T]) -> T:
    """Return what a call returns; the message of a user's mistake gets the name of this machine."""
    try:
        return call()
    except Exception as error:
        if (tell := user_error(error)) is None:
            raise
        raise UserError(f"{socket.gethostname()}: {tell}") from None
