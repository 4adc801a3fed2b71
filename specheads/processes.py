"""The processes of a run that torchrun, srun or the command itself started, and which of them this
one is.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Self, TypeVar

from specheads.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

_ARRIVAL = timedelta(minutes=10)  # all processes of a run must have been started by then
# The first process may work alone so long; if it dies, the launcher ends the others.
_PATIENCE = timedelta(days=30)
_calls = count()  # calls of `from_first`, which all processes make in the same order


@dataclass(frozen=True)
class Processes:
    """Which of the processes of a run this is.

    Without a launcher both counts are 1: this process may start others.
    """

    launcher: str | None  # torchrun or srun
    rank: int
    count: int
    local_rank: int  # the number among the processes of this machine
    count_here: int
    restarts: int = 0  # how often the launcher has started them again

    @classmethod
    def this(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Return this process.

        Raises UserError for variables of a launcher that contradict each other.
        """
        variables = os.environ if environment is None else environment

        def number(name: str, default: int) -> int:
            if not (text := variables.get(name, str(default))).isdecimal():
                raise UserError(
                    f"{name}={text} must be a number, as the launcher of the processes sets it."
                )
            return int(text)

        if "TORCHELASTIC_RUN_ID" in variables:
            count = number("WORLD_SIZE", 1)
            here = number("LOCAL_WORLD_SIZE", 1)
            _check_alike("torchrun", "--nproc-per-node", count, here)
            restarts = number("TORCHELASTIC_RESTART_COUNT", 0)
            return cls(
                "torchrun", number("RANK", 0), count, number("LOCAL_RANK", 0), here, restarts
            )
        # A single task is plain Python: the command starts a process per device itself.
        if "SLURM_STEP_ID" in variables and (count := number("SLURM_STEP_NUM_TASKS", 1)) > 1:
            here = number("SLURM_NTASKS_PER_NODE", 0)
            nodes = number("SLURM_STEP_NUM_NODES", 1)
            _check_alike("srun", "--ntasks-per-node", count, here if here * nodes == count else 0)
            restarts = number("SLURM_RESTART_COUNT", 0)
            return cls(
                "srun", number("SLURM_PROCID", 0), count, number("SLURM_LOCALID", 0), here, restarts
            )
        first = all(variables.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK"))
        local_rank = number("LOCAL_RANK", 0)
        return cls(None, 0 if first else max(1, local_rank), 1, local_rank, 1)

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files of the run, and speaks for all."""
        return self.rank == 0

    @property
    def num_machines(self) -> int:
        return self.count // self.count_here


def _check_alike(launcher: str, option: str, count: int, here: int) -> None:
    if here < 1 or count % here:
        raise UserError(
            f"{launcher} has started {count} processes, not the same number on every machine; give"
            f" {option}."
        )


def is_first_process() -> bool:
    """Whether this is the process of a distributed run that writes the files."""
    return Processes.this().is_first


def from_first(call: Callable[[], T]) -> T:
    """Return what `call` returns in the launcher's first process, plain data, in all of them.

    SystemExit if it fails there.
    """
    processes = Processes.this()
    if processes.launcher is None or processes.count == 1:
        return call()
    store = _store(processes)
    key = f"first-{next(_calls)}"
    if processes.is_first:
        answer = {}
        try:
            answer["value"] = call()
        finally:
            store.set(key, json.dumps(answer))
        return answer["value"]
    answer = json.loads(store.get(key))
    if "value" not in answer:
        raise SystemExit(2)
    return answer["value"]


@cache
def _store(processes: Processes) -> "Store":
    """Return the store that torch.distributed begins with, before there is a process group."""
    # It imports torch, which not every command needs.
    from torch.distributed import (
        PrefixStore,
        rendezvous,
    )

    if processes.launcher == "srun":
        from lightning.pytorch.plugins.environments import SLURMEnvironment  # slow to import

        environment = SLURMEnvironment(auto_requeue=False)
        # Sets the variables that `env://` reads.
        _ = (
            environment.main_address,
            environment.main_port,
        )
    store, *_ = next(iter(rendezvous("env://", processes.rank, processes.count, timeout=_ARRIVAL)))
    store.set_timeout(_PATIENCE)
    return PrefixStore(f"specheads-{processes.restarts}", store)
