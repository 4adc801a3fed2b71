"""Steps compiled at the same time, by processes that leave them on disk; the process that needs them loads them afterwards.

A compiler uses one core, and most of its time is Python's. Each process is a fork, so that models are neither loaded nor copied.
A step that a process cannot compile is compiled later, where it is needed, and errors are reported there.
"""

import logging
import os
import time
import warnings
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from specheads.decoding.engine.artefacts import is_kept, load_or_compile
from specheads.decoding.engine.compiled_program import CPU_OPTIONS, CompiledProgram

logger = logging.getLogger(__name__)

MOST_PROCESSES = 8
MOST_SECONDS = 600.0  # for one step


@dataclass(frozen=True)
class Job:
    """A step to compile."""

    what: str
    name: str | None  # of its file; None: it must not be kept
    compile_program: Callable[[], CompiledProgram]
    size: int = 0  # the larger, the longer it takes to compile


class Plan:
    """The steps that engines would prepare; while a plan is active, warm-ups add to it and prepare nothing."""

    active: "Plan | None" = None

    def __init__(self) -> None:
        self.jobs: dict[Hashable, Job] = {}

    def __enter__(self) -> Self:
        if Plan.active is not None:
            raise RuntimeError("plans cannot be nested")
        Plan.active = self
        return self

    def __exit__(self, *error: object) -> None:
        Plan.active = None


def compile_ahead(warm_ups: Iterable[Callable[[], Any]]) -> None:
    """Compile the steps that `warm_ups` would prepare and that are not on disk, several at a time."""
    if Plan.active is not None or not can_fork():
        return
    with Plan() as plan:
        for warm_up in warm_ups:
            warm_up()
    jobs = {job.name: job for job in plan.jobs.values() if job.name is not None and not is_kept(job.name)}
    if len(jobs) > 1:
        with suppress(Exception):  # what fails here fails again where it is needed, and is reported there
            load_compiler()
            run_in_processes(longest_first(jobs.values()), min(MOST_PROCESSES, os.cpu_count() or 1))


def can_fork() -> bool:
    """Whether forked processes can compile: on several cores, and not after CUDA was initialised, which does not survive it."""
    return hasattr(os, "fork") and (os.cpu_count() or 1) > 1 and not torch.cuda.is_initialized()


@cache
def load_compiler() -> None:
    """Compile a small step, after which all modules and headers are there that each fork would load or build for itself.

    Headers depend on the options, so these are the steps' options.
    """
    module = Doubled()
    CompiledProgram.compile(module, (torch.zeros(1, 3), torch.zeros(2)), {0: 1}, CPU_OPTIONS)


def load_compiler_during(build: Callable[[], object]) -> None:
    """Load the compiler while another process builds what this process will load from disk; errors show there."""
    process = fork(build)
    try:
        with suppress(Exception):
            load_compiler()
        os.waitpid(process, 0)
        process = 0
    finally:
        if process:
            os.kill(process, 9)
            os.waitpid(process, 0)


class Doubled(nn.Module):
    """A step for `load_compiler`."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, y.exp().sum()


def longest_first(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs in the order in which cores that take one after another end soonest."""
    return sorted(jobs, key=lambda job: -job.size)


def run_in_processes(jobs: list[Job], most: int) -> None:
    """Run jobs, `most` at a time."""
    started: dict[int, tuple[Job, float]] = {}
    waiting = list(jobs)
    try:
        while waiting or started:
            while waiting and len(started) < most:
                job = waiting.pop(0)
                started[fork(partial(load_or_compile, job.name, job.compile_program))] = job, time.monotonic()
            for process, (job, start) in list(started.items()):
                done, status = os.waitpid(process, os.WNOHANG)
                if not done and time.monotonic() - start > MOST_SECONDS:
                    os.kill(process, 9)
                if done:
                    del started[process]
                    if status:
                        logger.info("%s was not compiled ahead", job.what)
            time.sleep(0.02)
    finally:
        for process in started:
            os.kill(process, 9)
            os.waitpid(process, 0)


def fork(run: Callable[[], object]) -> int:
    """Start a process that compiles something; return its number."""
    with warnings.catch_warnings():
        # Python warns of threads, which do not exist in the fork; nothing there waits for them.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    status = 1
    try:
        from torch._inductor import config  # takes seconds to import

        torch.set_num_threads(1)  # OpenMP's threads do not exist here either
        config.compile_threads = 1
        run()
        status = 0
    finally:
        os._exit(status)
