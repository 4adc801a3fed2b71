"""What the processes that a launcher has started agree on: the first one decides, the others follow, or all of them end.

They talk through the store that torch.distributed begins with, before there is a process group. All processes ask for the same
things in the same order. Without a launcher there is nothing to agree on, and nothing here talks to anyone.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specheads.errors import UserError
from specheads.processes import Processes
from specheads.storage.leases import packages_here, timeout_seconds

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

ARRIVAL = timedelta(minutes=10)  # in which all processes of a run must have been started
PATIENCE = timedelta(days=30)  # for what the first process does alone; if it dies, the launcher ends the others
SAME_MISTAKE = timedelta(seconds=10)  # in which the first process makes the mistake that another one has made
FAILURE = "failure"


class Elsewhere(SystemExit):
    """Another process has failed, and says why."""

    def __init__(self) -> None:
        super().__init__(2)


class Agreement:
    """The talk of the processes of one run."""

    def __init__(self, processes: Processes, store: "Store") -> None:
        self.processes, self.store, self.count = processes, store, 0

    def decided(self, call: Callable[[], T]) -> T:
        """Return what `call` returns in the first process, as plain data; raises Elsewhere in the others if it fails there."""
        key = self._next_key()
        if not self.processes.is_first:
            answer = json.loads(self.store.get(key))
            if "value" not in answer:
                raise Elsewhere
            return answer["value"]
        answer = {}
        try:
            answer["value"] = call()
        finally:
            self.store.set(key, json.dumps(answer))
        return answer["value"]

    def check(self, problem: str | None) -> None:
        """Raise UserError in all processes if any of them has a problem: the first one, by rank."""
        key, first = self._next_key(), self.processes.is_first
        if not first:
            self.store.set(f"{key}/{self.processes.rank}", problem or "")
            verdict = self.store.get(key).decode()
        else:
            reports = [self._report(key, rank) for rank in range(1, self.processes.count)]
            verdict = problem or next(filter(None, reports), "")
            self.store.set(key, verdict)
        if verdict:
            raise UserError(verdict)

    def _report(self, key: str, rank: int) -> str:
        """Return what another process says, or that it says nothing."""
        try:
            self.store.wait([f"{key}/{rank}"], ARRIVAL)
        except RuntimeError:
            minutes = ARRIVAL.total_seconds() / 60
            return f"process {rank} has not arrived within {minutes:.0f} minutes; its output, or that of its launcher, says why."
        return self.store.get(f"{key}/{rank}").decode()

    def is_said_by_first(self, message: str) -> bool:
        """Return whether the first process has failed with the same message, or is about to."""
        with contextlib.suppress(RuntimeError):  # the first process may have ended, and the store with it
            self.store.wait([FAILURE], SAME_MISTAKE)
            return self.store.get(FAILURE).decode() == message
        return False

    def tell_failure(self, message: str) -> None:
        """Let the other processes know how the first one has failed."""
        with contextlib.suppress(RuntimeError):
            self.store.set(FAILURE, message)

    def leave(self, failed: bool) -> None:
        """End the talk. With srun the first process keeps the store, so it waits until the others have read everything."""
        with contextlib.suppress(RuntimeError):
            if not self.processes.is_first:
                self.store.set(f"left/{self.processes.rank}", "")
            elif self.processes.launcher == "srun":
                others = [f"left/{rank}" for rank in range(1, self.processes.count)]
                self.store.wait(others, SAME_MISTAKE if failed else ARRIVAL)

    def _next_key(self) -> str:
        self.count += 1
        return str(self.count)


def decided(call: Callable[[], T]) -> T:
    """Return what `call` returns in the first process; see Agreement."""
    agreement = begun()
    return call() if agreement is None else agreement.decided(call)


def after_first(call: Callable[[], T]) -> T:
    """Call in the first process, and when that has ended in the others, which find its work done."""
    agreement = begun()
    if agreement is None or agreement.processes.is_first:
        results: list[T] = []
        decided(lambda: results.append(call()))
        return results[0]
    agreement.decided(lambda: None)
    return call()


def check_together(run: Path, data: Path, key: str) -> None:
    """Raise UserError unless all processes were started alike and share the folders of the run and of the data."""
    agreement = begun()
    if agreement is None:
        return
    first = agreement.decided(lambda: _description(agreement.processes, key) | {"sign": _left_sign(run, data)})
    agreement.check(_difference(first, _description(agreement.processes, key)) or _missing_sign(first, run, data))
    if agreement.processes.is_first:
        for folder in (run, data):
            (folder / first["sign"]).unlink(missing_ok=True)


def begun() -> Agreement | None:
    """Return the talk of this process with the others, None if it is alone."""
    processes = Processes.this()
    return _begun(processes) if processes.launcher and processes.count > 1 else None


def has_begun() -> bool:
    """Whether this process talks to the others already."""
    return _begun.cache_info().currsize > 0


@cache
def _begun(processes: Processes) -> Agreement:
    from torch.distributed import PrefixStore, rendezvous  # with torch, which not every command needs

    if processes.launcher == "srun":
        from lightning.pytorch.plugins.environments import SLURMEnvironment  # slow to import

        environment = SLURMEnvironment(auto_requeue=False)
        _ = environment.main_address, environment.main_port  # sets the variables that `env://` reads
    store, *_ = next(iter(rendezvous("env://", processes.rank, processes.count, timeout=ARRIVAL)))
    store.set_timeout(PATIENCE)
    return Agreement(processes, PrefixStore(f"specheads-{processes.restarts}", store))


def _description(processes: Processes, key: str) -> dict[str, Any]:
    """Return what must be the same in all processes, and where this one is."""
    return {"key": key, "count": processes.count, "packages": packages_here(), "host": socket.gethostname()}


def _difference(first: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Return what is wrong with a process that was started in another way than the first one."""
    rank = Processes.this().rank
    who, other = f"process {rank} on {here['host']}", f"the first process on {first['host']}"
    if first["count"] != here["count"]:
        return f"{who} is one of {here['count']} processes, and {other} one of {first['count']}; start all of them at once."
    if first["packages"] != here["packages"]:
        versions = [", ".join(f"{name} {number}" for name, number in each["packages"].items()) for each in (here, first)]
        return f"{who} has {versions[0]}, and {other} {versions[1]}; install the same versions on every machine."
    if first["key"] != here["key"]:
        return f"{who} has other settings than {other}; give the same command line, and the same configs, on every machine."
    return None


def _left_sign(*folders: Path) -> str:
    """Leave a file in every folder; return its name."""
    name = f".shared-{os.getpid()}-{time.time_ns()}"
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return name


def _missing_sign(first: dict[str, Any], run: Path, data: Path) -> str | None:
    """Return what is wrong if a sign of the first process does not appear here, as soon as file systems show changes."""
    end = time.monotonic() + timeout_seconds()
    folders = {"paths.outputs": run, "paths.data": data}
    while missing := [key for key, folder in folders.items() if not (folder / first["sign"]).exists()]:
        if time.monotonic() > end:
            return (
                f"process {Processes.this().rank} on {socket.gethostname()} does not see what the first process, on "
                f"{first['host']}, writes to {folders[missing[0]]}; give {missing[0]}= a folder that all machines share, and "
                "start every process in the same folder."
            )
        time.sleep(0.1)
    return None
