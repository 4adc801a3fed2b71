"""How busy other processes keep this machine, by Linux's counters: what they leave decides threads
and what times are worth.

Threads that share a loop wait for each other, so that a core which another process has too slows
all of them: on two cores, next to one busy process, two threads decode at 26 % of their speed alone
and one thread at 57 %; next to two of them at 9 and 37 %.
"""

import logging
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_COUNTERS = Path("/proc/stat")
_SECONDS = 1.0  # between two looks at the counters while it decodes
# That the first look takes, if others run: with too many threads so much work may take a second
_FIRST_SECONDS = 0.05
_ROUNDING = 0.3  # of a core that others may use of one that a thread still takes
# Cores that others take from this process, from which on its times are not those of a quiet machine
NOTABLE = 0.25


def processor_name() -> str:
    """Return the model of the processor; its architecture where the system does not say."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        model = re.search(r"^model name\s*: (.+)$", information.read_text(), re.MULTILINE)
        if model:
            return model[1]
    return platform.processor() or platform.machine()


def available_memory(root: Path = Path("/")) -> float:
    """Return the bytes of memory that this process may still take.

    Infinity where the system, whose files are in `root`, does not say.
    """
    limits = [float("inf")]
    information = root / "proc" / "meminfo"
    if information.is_file() and (
        free := re.search(r"MemAvailable: *(\d+)", information.read_text())
    ):
        limits.append(int(free[1]) * 1024)
    most = root / "sys" / "fs" / "cgroup" / "memory.max"
    used = most.with_name("memory.current")
    if most.is_file() and used.is_file() and most.read_text().strip() != "max":
        limits.append(int(most.read_text()) - int(used.read_text()))
    return min(limits)


def memory_in_use() -> int:
    """Return the bytes of memory that this process has; 0 where the system does not say."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.is_file() else 0


class OthersLoad:
    """The cores that other processes keep busy.

    Niced ones make room, so they count only where this process is niced itself.
    """

    def __init__(self) -> None:
        self.cores, self._others, self._wall = _counters()

    def next(self) -> float:
        """Return their mean number since the last call, at least 0.

        0 where there are no counters.
        """
        others = self._others
        wall = self._wall
        self.cores, self._others, self._wall = _counters()
        return max(0.0, (self._others - others) / (self._wall - wall)) if self._wall > wall else 0.0

    def taken(self, threads: int) -> float:
        """Return how many of the cores that so many threads would use were busy since the last
        call.
        """
        return max(0.0, self.next() - max(0, self.cores - threads))


def _counters() -> tuple[int, float, float]:
    """Return the number of cores, and seconds: busy ones of all cores but for this process's, and
    those of the clock.
    """
    now = time.perf_counter()
    own = sum(os.times()[:2])
    try:
        lines = _COUNTERS.read_text().splitlines()
        user, niced, system, _, _, interrupts, others, stolen = map(int, lines[0].split()[1:9])
        user += niced if os.nice(0) > 0 else 0
    except (OSError, ValueError, IndexError):  # another system, or a sandbox with another file
        return os.cpu_count() or 1, -own, now
    number = sum(line.startswith("cpu") for line in lines) - 1
    return (
        number,
        (user + system + interrupts + others + stolen) / os.sysconf("SC_CLK_TCK") - own,
        now,
    )


def _others_run() -> bool:
    """Whether at this moment another thread than this one has a core or waits for one."""
    counters = _COUNTERS.read_text() if _COUNTERS.is_file() else ""
    running = re.search(r"^procs_running (\d+)$", counters, re.MULTILINE)
    return running is not None and int(running[1]) > 1


class _Threads:
    """The threads of torch in this process, fewer while others keep cores busy."""

    def __init__(self) -> None:
        self.load = OthersLoad()
        self.due = 0.0
        self.most = 0
        self.now = 0
        self.has_logged = False
        self.in_block = False

    def begin(self) -> None:
        """Look at the counters for a moment if others run, unless a block ended just now.

        What passed before, such as compilers at work, does not count.
        """
        if time.perf_counter() - self.due > _SECONDS:
            self.load.next()
            if self.most > 1 and _others_run():
                time.sleep(_FIRST_SECONDS)
            self._look()
        else:
            self._set_threads()

    def adapt(self) -> None:
        """Look at the counters, if a second has passed since the last look, and set the number of
        threads in a block that runs by load.
        """
        if time.perf_counter() >= self.due and self.in_block:
            self._look()

    def _look(self) -> None:
        self.due = time.perf_counter() + _SECONDS
        others = self.load.next()
        self.now = max(1, min(self.most, int(self.load.cores - others + _ROUNDING)))
        self._set_threads()
        if self.now < self.most and not self.has_logged:
            self.has_logged = True
            how = (
                "other processes keep %.1f of %d cores busy: it computes with %d of %d threads"
                " while they do"
            )
            logger.info(how, others, self.load.cores, self.now, self.most)

    def _set_threads(self) -> None:
        import torch

        if self.now != torch.get_num_threads():
            torch.set_num_threads(self.now)


_threads = _Threads()


@contextmanager
def threads_by_load() -> Iterator[None]:
    """Run the block with as many threads as the last look at the counters leaves.

    `adapt_threads` looks again. Within such a block another one changes nothing.
    """
    import torch

    if _threads.in_block:
        yield
        return
    most = torch.get_num_threads()
    if most != _threads.most:  # a user's choice
        _threads.most = _threads.now = most
    _threads.begin()
    _threads.in_block = True
    try:
        yield
    finally:
        _threads.in_block = False
        if torch.get_num_threads() != most:
            torch.set_num_threads(most)


adapt_threads = _threads.adapt
