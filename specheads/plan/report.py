"""A plan as text: rows for a table, what each stage is bound by, and the notes that say what was left out."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specheads.pair_needs import memory_text, size_text
from specheads.plan.machine import Machine
from specheads.plan.models import PlannedPair
from specheads.plan.settings import PlanSettings
from specheads.plan.stages import Stage

COLUMNS = ("stage", "tokens", "passes", "stored", "time", "GPUs", "GPU-h", "GB/GPU")


def columns(settings: PlanSettings) -> list[str]:
    """Return the names of the columns, with that of costs where a price is known."""
    return [*COLUMNS, *(["cost"] if settings.price else [])]


def rows(stages: Sequence[Stage], settings: PlanSettings) -> list[list[str]]:
    """Return a row per stage, and their sum."""
    shown = [[*_row(stage), *_cost(stage.gpu_hours, settings)] for stage in stages]
    hours, seconds = sum(stage.gpu_hours for stage in stages), sum(stage.seconds for stage in stages)
    stored = memory_text(sum(stage.stored_bytes for stage in stages))
    most = f"{max(stage.memory_bytes for stage in stages) / 1e9:.1f}"
    return [*shown, ["all", "", "", stored, time_text(seconds), "", hours_text(hours), most, *_cost(hours, settings)]]


def _row(stage: Stage) -> list[str]:
    stored = memory_text(stage.stored_bytes) if stage.stored_bytes else "-"
    gpus = f"{stage.gpus}" if stage.busy == stage.gpus else f"{stage.busy}/{stage.gpus}"
    numbers = [count_text(stage.tokens), count_text(stage.passes), stored, time_text(stage.seconds)]
    return [stage.name, *numbers, gpus, hours_text(stage.gpu_hours), f"{stage.memory_bytes / 1e9:.1f}"]


def _cost(gpu_hours: float, settings: PlanSettings) -> list[str]:
    return [f"{gpu_hours * settings.price:,.2f}"] if settings.price else []


def count_text(count: float) -> str:
    """Return a count with three digits, "16.1M"."""
    size, sign = next(((size, sign) for size, sign in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= size), (1.0, ""))
    return f"{count / size:.3g}{sign}"


def time_text(seconds: float) -> str:
    """Return seconds in the largest suitable unit, "1.7 h"."""
    size, sign = next(((size, sign) for size, sign in ((3600.0, "h"), (60.0, "min")) if seconds >= size), (1.0, "s"))
    return f"{seconds / size:.3g} {sign}"


def hours_text(hours: float) -> str:
    """Return GPU-hours with two digits or more."""
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}"


def title(pair: PlannedPair, machine: Machine, settings: PlanSettings) -> str:
    """Return the pair, the machine and the prompts."""
    sizes = " for ".join(size_text(model.sizes.num_weights) for model in (pair.draft, pair.target))
    return f"{pair.name} ({sizes}) on {machine.count} {machine.name}, {settings.prompts:,} prompts"


def bounds(stages: Sequence[Stage]) -> list[str]:
    """Return a sentence per stage: which resource bounds it, and whether GPUs wait."""
    waits = "; one of the GPUs that it holds is busy at a time"
    return [f"{stage.name}: bound by {stage.bound}{waits if stage.busy < stage.gpus else ''}" for stage in stages]


def notes(machine: Machine, settings: PlanSettings) -> str:
    """Return what the numbers rest on."""
    device = machine.accelerator
    return (
        f"Computed from {device.source}, at {device.bytes_share:.0%} of {device.bytes_per_second / 1e12:.3g} TB/s and "
        f"{device.operations_share:.0%} of {device.operations_per_second / 1e12:.3g} TFLOP/s. Assumed: "
        f"{settings.prompt_tokens:g} + {settings.response_tokens:g} tokens per prompt and response, {settings.acceptance:.0%} of "
        f"drafted tokens accepted, a disk of {settings.disk:g} GB/s. Left out: loading and compiling models, what GPUs send each "
        "other, padding, sampling, attention over read texts."
    )


def commands(stages: Sequence[Stage]) -> list[str]:
    """Return the command lines, in order."""
    return [stage.command for stage in stages if stage.command.startswith("specheads ")]


def as_json(pair: PlannedPair, machine: Machine, settings: PlanSettings, stages: Sequence[Stage]) -> dict[str, Any]:
    """Return the content of plan.json; bytes, seconds and hours are numbers."""
    listed = []
    for stage in stages:
        derived = {"seconds": stage.seconds, "gpu_hours": stage.gpu_hours, "bound": stage.bound}
        costs = {"cost": stage.gpu_hours * settings.price} if settings.price else {}
        listed.append(asdict(stage) | derived | costs)
    return {"pair": pair.name, "settings": settings.values(), "machine": asdict(machine), "stages": listed}
