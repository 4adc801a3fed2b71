"""What a process holds, sampled while it works, and the slopes of it with their intervals. Linux with glibc 2.33 or later."""

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NUM_BINS = 24  # means of consecutive samples: single ones depend on their neighbours, and would make an interval too narrow
WARM_UP = 0.25  # of the samples, that are left out: caches fill, and allocators find their size
HEAP_COUNTS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
LARGEST_GROWTH = 0.02  # of the mean, over the time that was observed, that still counts as flat


@dataclass(frozen=True)
class Usage:
    """What this process holds."""

    resident: float  # bytes, with those that the C heap has free and keeps
    heap: float  # bytes of the C heap that are in use: tensors, and what libraries allocate
    blocks: int  # that Python's own allocator has in use
    files: int
    threads: int

    @classmethod
    def now(cls) -> "Usage":
        """Return what it holds at this moment."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        resident = 1024.0 * int(status["VmRSS"].split()[0])
        return cls(resident, heap_in_use(), sys.getallocatedblocks(), len(os.listdir("/proc/self/fd")), int(status["Threads"]))


class HeapInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns, in its order."""

    _fields_ = [(name, ctypes.c_size_t) for name in HEAP_COUNTS]


def heap_in_use() -> float:
    """Return the bytes of the C heap that are allocated, in its arenas and in mappings of their own."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = HeapInfo
    info = mallinfo()
    return float(info.uordblks + info.hblkhd)


@dataclass(frozen=True)
class Slope:
    """A straight line through samples: its mean height, and its slope with a 95 % interval."""

    mean: float
    value: float
    low: float
    high: float
    span: float  # of the times that the samples were taken at

    @property
    def growth(self) -> float:
        """What is gained over the span, as a share of the mean."""
        return self._growth(self.value)

    @property
    def is_flat(self) -> bool | None:
        """Whether nothing grows by more than LARGEST_GROWTH, anywhere in the interval; None where it is too wide to tell."""
        if self._growth(self.high) <= LARGEST_GROWTH:
            return True
        return False if self.low > 0 and self.growth > LARGEST_GROWTH else None

    def _growth(self, value: float) -> float:
        return value * self.span / self.mean if self.mean else 0.0

    def per(self, amount: float) -> dict[str, float]:
        """Return slope and interval per so much time."""
        return {"value": self.value * amount, "low": self.low * amount, "high": self.high * amount}


def slope(times: Sequence[float], values: Sequence[float]) -> Slope:
    """Return the least-squares slope of values over times, without the first samples, of means of consecutive ones.

    Raises:
        ValueError: fewer than three samples are left.
    """
    first = int(WARM_UP * len(times))
    x, y = np.array(times[first:], dtype=float), np.array(values[first:], dtype=float)
    if len(x) < 3:
        raise ValueError(f"{len(times)} samples are too few for a slope; take at least 3")
    mean = float(y.mean())
    bins = np.array_split(np.arange(len(x)), min(NUM_BINS, len(x)))
    x, y = (np.array([part[index].mean() for index in bins]) for part in (x, y))
    centred = x - x.mean()
    deviations = y - y.mean()  # exactly 0 where nothing changes, and so is the slope
    value = float(centred @ deviations / (centred @ centred))
    residuals = deviations - value * centred
    degrees = len(x) - 2
    error = float(np.sqrt(residuals @ residuals / degrees / (centred @ centred)))
    half = student(degrees) * error
    return Slope(mean, value, value - half, value + half, float(x[-1] - x[0]))


def mean_ratio(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the geometric mean of ratios with its 95 % interval.

    Raises:
        ValueError: fewer than two pairs.
    """
    if len(pairs) < 2:
        raise ValueError(f"{len(pairs)} pairs are too few for an interval; take at least 2")
    logs = [float(np.log(first / second)) for first, second in pairs]
    mean, half = statistics.mean(logs), student(len(logs) - 1) * statistics.stdev(logs) / len(logs) ** 0.5
    return {"value": float(np.exp(mean)), "low": float(np.exp(mean - half)), "high": float(np.exp(mean + half))}


def student(degrees: int) -> float:
    """Return about the 97.5 % quantile of Student's distribution (Abramowitz and Stegun, 26.7.5)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = [z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384]
    return sum(term / degrees**power for power, term in enumerate(terms))


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self.start
