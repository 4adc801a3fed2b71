"""A trace of decoding by torch.profiler: when each stage ran on the host and on the device, and which kernels took the time."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from specheads import SpeculativeDecoder

STAGES = ("draft step", "verification")
FIRST_SPANS, LARGEST_KERNELS = 12, 12


@dataclass(frozen=True)
class Span:
    """A piece of a trace in microseconds; `name` is a stage's or a kernel's."""

    name: str
    start: float
    end: float
    on_device: bool


def named(name: str, compiled_step: Callable) -> Callable:
    """Return a step that the profiler shows under a name."""

    def run(*args: object) -> object:
        with record_function(name):
            return compiled_step(*args)

    return run


def traced(decoder: SpeculativeDecoder, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """Return the timeline of a response; the steps of the decoder stay named."""
    decoder._drafter._step = named(STAGES[0], decoder._drafter._step)
    decoder._verifier._compiled_step = named(STAGES[1], decoder._verifier._compiled_step)
    activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & set(supported_activities())
    with profile(activities=activities) as profiler:
        decoder.generate(prompt, num_tokens)
    return timeline(
        Span(event.name, event.time_range.start, event.time_range.end, event.device_type == DeviceType.CUDA)
        for event in profiler.events()
    )


def timeline(events: Iterable[Span]) -> dict[str, Any]:
    """Return the first stages with their times, the share of the rounds in which the device was busy, and the largest kernels.

    Times are in microseconds after the first stage began. A stage is also shown where it ran on the device, if it did.
    """
    events = list(events)
    host = sorted((each for each in events if each.name in STAGES and not each.on_device), key=lambda each: each.start)
    begin, end = host[0].start, max(each.end for each in host)
    device = sorted((each for each in events if each.name in STAGES and each.on_device), key=lambda each: each.start)
    kernels = [each for each in events if each.on_device and each.name not in STAGES and begin <= each.start < end]
    total, per_stage = end - begin, {name: sum(each.end - each.start for each in host if each.name == name) for name in STAGES}
    return {
        "microseconds": total,
        "host": [_row(each, begin) for each in host[:FIRST_SPANS]],
        "device": [_row(each, begin) for each in device[:FIRST_SPANS]],
        "host_share": {name: spent / total for name, spent in per_stage.items()},
        "not_in_a_stage": 1 - sum(per_stage.values()) / total,
        "device_busy": covered(kernels) / total if kernels else None,
        "kernels": largest(kernels),
    }


def _row(span: Span, begin: float) -> dict[str, Any]:
    return {"stage": span.name, "start": span.start - begin, "end": span.end - begin}


def covered(spans: Sequence[Span]) -> float:
    """Return the microseconds in which at least one span runs."""
    total, reached = 0.0, -float("inf")
    for span in sorted(spans, key=lambda each: each.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def largest(kernels: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the kernels that take the most time together, by name."""
    spent: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        spent[kernel.name].append(kernel.end - kernel.start)
    rows = [{"kernel": name, "calls": len(times), "microseconds": sum(times)} for name, times in spent.items()]
    return sorted(rows, key=lambda row: -row["microseconds"])[:LARGEST_KERNELS]
