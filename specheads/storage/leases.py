"""Leases: which of several workers, on any number of machines with a shared folder, makes which part of a work.

A lease is a file that only one worker can create, and that its holder rewrites every few seconds. It may be taken over once its
process has ended, if that ran on this machine, or once it has not changed for `timeout` seconds by the clock of whoever wants it:
clocks of two machines are never compared. Leases save work. They do not keep results whole, which writing under another name and
renaming does: a holder that was suspended for too long finds its lease gone, and drops what it made.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from specheads.errors import UserError, is_count
from specheads.storage.files import open_inside

logger = logging.getLogger(__name__)

TIMEOUT = "SPECHEADS_LEASE_SECONDS"  # an environment variable: it belongs to the machine and its file system
DEFAULT_TIMEOUT = 60.0  # more than a network file system delays changes by default
RENEWALS = 5  # per timeout
POLLS = 0.05, 2.0  # seconds between two looks at leases of others: at first, and at most
LARGEST_PROCESS = 2**31 - 1
PACKAGES = ("specheads", "torch", "transformers")  # that decide the bytes of what a worker makes


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease; `machine` is the same only where process numbers are."""

    machine: str
    host: str
    process: int
    started: str
    packages: dict[str, str]

    @classmethod
    def this(cls) -> "Holder":
        """Return this process."""
        return cls(_machine(), socket.gethostname(), os.getpid(), _started(os.getpid()), packages_here())

    @classmethod
    def read(cls, content: bytes) -> "Holder | None":
        """Return the holder from the content of a lease; None for one that is being written, or damaged."""
        try:
            holder = cls(**json.loads(content)["holder"])
        except (ValueError, TypeError, LookupError, RecursionError):
            return None
        texts = holder.machine, holder.host, holder.started
        known = all(isinstance(text, str) for text in texts) and isinstance(holder.packages, dict)
        return holder if known and is_count(holder.process, least=1) and holder.process <= LARGEST_PROCESS else None

    def has_ended(self) -> bool:
        """Whether the process is known to have ended."""
        if self.machine != _machine():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it is another user's
        return _started(self.process) != self.started


class Leases:
    """The leases that a worker holds in one folder. A context manager: at its end it holds none."""

    def __init__(self, folder: Path, timeout: float | None = None) -> None:
        """Hold nothing yet.

        Args:
            timeout: seconds after which a lease that its holder does not renew may be taken over; default `timeout_seconds()`.
        """
        self.folder = folder
        self.timeout = timeout_seconds() if timeout is None else timeout
        self._holder = json.dumps(asdict(Holder.this()))
        self._token = secrets.token_hex(4)
        self._held: dict[str, int] = {}  # file descriptors by name
        self._seen: dict[str, tuple[bytes, float]] = {}  # leases of others, and since when they have been like that
        self._guard = threading.Lock()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._renew, daemon=True, name="leases").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for name in list(self._held):
            self.release(name)

    def take(self, name: str) -> bool:
        """Take a lease if it is free; return whether it was.

        Raises:
            UserError: it belongs to a worker with other versions of packages.
        """
        path = self._path(name)
        try:
            descriptor = open_inside(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return self._is_free(name) and self._remove(path) and self.take(name)
        try:
            os.pwrite(descriptor, self._content(0), 0)
        except OSError as error:  # such as on a full disk; an empty lease would keep others waiting
            os.close(descriptor)
            path.unlink()
            raise OSError(error.errno, error.strerror, str(path)) from None
        with self._guard:
            self._held[name] = descriptor
        return True

    def holds(self, name: str) -> bool:
        """Return whether a lease that this worker took is still its."""
        return name in self._held and self._token in _read(self._path(name)).decode(errors="replace")

    def holds_all(self) -> bool:
        """Return whether all leases that this worker took are still its."""
        return all(self.holds(name) for name in list(self._held))

    def release(self, name: str) -> None:
        """Give a lease back."""
        held = self.holds(name)
        with self._guard:
            os.close(self._held.pop(name))
        if held:
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f".{name}.lease"

    def _content(self, renewals: int) -> bytes:
        """Return the text of a lease, whose length is always the same."""
        return f'{{"lease": "{self._token}", "renewals": "{renewals:012d}", "holder": {self._holder}}}\n'.encode()

    def _renew(self) -> None:
        renewals = 0
        while not self._ended.wait(self.timeout / RENEWALS):
            renewals += 1
            with self._guard, contextlib.suppress(OSError):  # one that cannot be renewed ends, which its holder notices
                for descriptor in self._held.values():
                    os.pwrite(descriptor, self._content(renewals), 0)  # to this worker's file, also if it is no longer there

    def _is_free(self, name: str) -> bool:
        """Return whether the lease of another worker may be taken over."""
        content, now = _read(self._path(name)), time.monotonic()
        if self._token in content.decode(errors="replace"):
            raise RuntimeError(f"{name} is taken by this worker already")
        holder = Holder.read(content)
        if holder is not None and holder.has_ended():
            logger.warning("%s: its worker, process %d, has ended; it is taken over", name, holder.process)
            return True
        if name not in self._seen or self._seen[name][0] != content:
            self._seen[name] = content, now
            if holder is not None:
                _check_packages(holder, self.folder)
        if now - self._seen[name][1] <= self.timeout:
            return False
        whose = f"process {holder.process} on {holder.host}" if holder else "a worker"
        logger.warning("%s: %s has not renewed its lease for %.0f s; it is taken over", name, whose, self.timeout)
        return True

    def _remove(self, path: Path) -> bool:
        """Remove a lease that may be taken over; return whether no other worker was faster."""
        aside = path.with_name(f"{path.name}.{self._token}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return False
        aside.unlink()
        return True


def each_free(
    leases: Leases,
    names: Sequence[str],
    done: Callable[[str], bool],
    elsewhere: Callable[[str], object] = lambda name: None,
) -> Iterator[str]:
    """Yield the names of work that is not done, each under its lease until the next; end when all is done, by whomever.

    Args:
        done: whether the work of a name is done.
        elsewhere: called with each name whose work another worker has done in the meantime.
    """
    left, wait = [name for name in names if not done(name)], POLLS[0]
    while left:
        mine: set[str] = set()
        for name in left:
            if leases.take(name):
                mine.add(name)
                if done(name):
                    elsewhere(name)
                else:
                    yield name
                leases.release(name)
        still = [name for name in left if not done(name)]
        for name in set(left) - mine - set(still):
            elsewhere(name)
        if still and not mine:
            if wait == POLLS[0]:
                logger.info("waiting for other workers, who are making %s in %s", _listed(still), leases.folder)
            time.sleep(wait)
            wait = min(2 * wait, POLLS[1])
        left = still


def timeout_seconds() -> float:
    """Return the seconds after which a lease that its holder does not renew may be taken over.

    Raises:
        UserError: the environment variable with them is no number of seconds.
    """
    given = os.environ.get(TIMEOUT) or str(DEFAULT_TIMEOUT)
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{TIMEOUT}={given} must be a number of seconds above 0; leave it out for {DEFAULT_TIMEOUT:g}.")
    return seconds


def _check_packages(holder: Holder, folder: Path) -> None:
    """Raise UserError if another worker has other versions: its shards might be others."""
    ours = packages_here()
    different = [name for name in PACKAGES if holder.packages.get(name) != ours[name]]
    if different:
        theirs = ", ".join(f"{name} {holder.packages.get(name)}" for name in different)
        raise UserError(
            f"process {holder.process} on {holder.host} is at work in {folder} with {theirs}; this process has "
            f"{', '.join(f'{name} {ours[name]}' for name in different)}. Install the same versions for all workers, or wait "
            "until that one has finished."
        )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _read(path: Path) -> bytes:
    """Return the content of a lease, empty if there is none."""
    try:
        descriptor = open_inside(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read()


@cache
def packages_here() -> dict[str, str]:
    """Return the versions of the packages that decide the bytes of what this process makes."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "of a source tree"
    return versions


@cache
def _machine() -> str:
    """Return what is the same for all processes that this one can see by their numbers."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.is_file() and namespace.is_symlink():
        return f"{boot.read_text().strip()} {os.readlink(namespace)}"
    return socket.gethostname()


def _started(process: int) -> str:
    """Return when a process was started, which tells it from a later one with its number; empty where that cannot be read.

    It is empty for a process, too, that has ended and whose parent has not noticed yet.
    """
    try:
        status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if status[0] in "ZX" else status[19]
