"""The machine of a plan: an accelerator of a data sheet, or this CPU at the rates that were measured on it."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from specheads.decoding.load.roofline import ACCELERATORS, Accelerator
from specheads.errors import UserError
from specheads.plan.settings import CPU, PlanSettings
from specheads.training.distill.memory import USABLE

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NANO_TARGET, LARGE = 5_246_208, 348_701_696  # parameters of the models that were timed
NODE = 8  # GPUs that are connected fast enough to share each layer


@dataclass(frozen=True)
class Machine:
    """Some accelerators of a kind.

    `overheads` tells by stage how many times as long it takes as its products and reads alone, where that was measured.
    """

    name: str
    accelerator: Accelerator
    count: int
    overheads: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: PlanSettings) -> Self:
        """Return the machine of a plan.

        Raises:
            UserError: a GPU that is not known, several CPUs, a CPU without measured rates.
        """
        if settings.gpu == CPU:
            if settings.gpus != 1:
                raise UserError(f"gpus={settings.gpus}: gpu=cpu is a single machine; write gpus=1.")
            return cls(CPU, measured_cpu(), 1, measured_overheads())
        if settings.gpu not in ACCELERATORS:
            raise UserError(f"gpu={settings.gpu} is not known; use one of {', '.join(ACCELERATORS)}, or cpu.")
        device = replace(ACCELERATORS[settings.gpu], bytes_share=settings.bytes_share, operations_share=settings.operations_share)
        return cls(settings.gpu, device, settings.gpus)

    @property
    def usable(self) -> float:
        """The bytes of one accelerator that a run can use."""
        return USABLE * self.accelerator.memory_bytes

    @property
    def connected(self) -> int:
        """How many share each layer: the largest power of two that divides their number, within a node."""
        return math.gcd(self.count, NODE)

    def held(self, what: str, num_bytes: float) -> int:
        """Return how many a stage holds: the fewest for its bytes; raises UserError if there are not as many."""
        self.check_fits(what, num_bytes)
        return self.fewest(num_bytes)

    def fewest(self, num_bytes: float) -> int:
        """Return how many hold some bytes."""
        return max(math.ceil(num_bytes / self.usable), 1)

    def check_fits(self, what: str, num_bytes: float) -> None:
        """Raise UserError if bytes do not fit."""
        if num_bytes > self.count * self.usable:
            raise UserError(
                f"{what} needs {num_bytes / 1e9:.3g} GB, but gpus={self.count} of gpu={self.name} hold "
                f"{self.count * self.usable / 1e9:.3g} GB, {USABLE:.0%} of their memory; use "
                f"gpus={self.fewest(num_bytes)}, a GPU with more memory, quantization=int4, or a smaller pair."
            )


def measured_cpu() -> Accelerator:
    """Return the rates of the CPU on which the results in benchmarks/ were measured, with the memory of this machine.

    Weights are read as fast as by a step of a model that is too large for caches, in bfloat16; operations are those of decoding
    a large batch of a small model.

    Raises:
        UserError: there are no such results.
    """
    try:
        steps = _cells(
            "steps", "times", {"model": "synthetic-300m", "type": "bfloat16", "mode": "sampled", "step": "target alone"}
        )
        speed = _cells("data_generation", "speed", {"batch size": "128"})
    except OSError:
        raise UserError(f"gpu=cpu needs {RESULTS}, which a source tree has; use gpu={next(iter(ACCELERATORS))}.") from None
    operations = 2 * NANO_TARGET * speed["tokens/s"]
    return Accelerator(
        bytes_per_second=2 * LARGE / steps["time"],
        operations_per_second=operations,
        source="benchmarks/results: steps.json, data_generation.json",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        float32_per_second=operations,
        bytes_share=1,
        operations_share=1,
    )


def measured_overheads() -> dict[str, float]:
    """Return how many times as long each stage of nano took as its products and reads at these rates, where that was kept."""
    try:
        table = _table("plan_overheads", "overheads")
    except FileNotFoundError:
        return {}
    names = [column["name"] for column in table["columns"]]
    return {row[names.index("stage")]: row[names.index("over that")] for row in table["rows"]}


def _table(result: str, key: str) -> dict[str, Any]:
    content = json.loads((RESULTS / f"{result}.json").read_text())
    (chosen,) = [each for each in content["tables"] if each["key"] == key]
    return chosen


def _cells(result: str, table: str, where: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a result's table that has the values of `where`, by the names of its columns."""
    chosen = _table(result, table)
    rows = [dict(zip([column["name"] for column in chosen["columns"]], row, strict=True)) for row in chosen["rows"]]
    return next(row for row in rows if row.items() >= where.items())
