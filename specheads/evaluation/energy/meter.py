"""Joules from counters of the hardware: how they are read, how often they move, and the power that an idle machine takes.

Counters move in steps, about once a millisecond (RAPL) to ten times a second (NVML). A short response may therefore show no
energy, or that of its neighbour; only sums over many responses say something, with the error of `resolution_error`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

IDLE_SECONDS = 3.0
POLL_SECONDS = 0.001
LEAST_MOVES = 3  # of a counter while the machine is idle


class NotMeasurable(Exception):
    """Why energy cannot be measured here, and what would help."""


class EnergyCounter(Protocol):
    """A counter of the hardware."""

    name: str  # what it counts, for example `RAPL package-0`

    def joules(self) -> float:
        """Return the joules since an arbitrary moment."""


class Energy(NamedTuple):
    """Joules, and the seconds in which they were taken; of a reading, both since an arbitrary moment."""

    joules: float
    seconds: float

    def since(self, start: "Energy") -> "Energy":
        """Return what was taken between two readings."""
        return Energy(self.joules - start.joules, self.seconds - start.seconds)


@dataclass(frozen=True)
class Idle:
    """The power of the machine while nothing runs, measured for so many seconds, and the time between two moves of a counter."""

    watts: float
    seconds: float
    update_seconds: float  # of the slowest counter


class EnergyMeter:
    """The sum of all counters of the devices that decode."""

    def __init__(
        self,
        counters: Sequence[EnergyCounter],
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Measure the idle power for `idle_seconds`; nothing else should run meanwhile.

        Raises:
            NotMeasurable: a counter does not move.
        """
        self.counters, self._clock, self._sleep = counters, clock, sleep
        self.idle = self._measure_idle(idle_seconds)

    @property
    def names(self) -> list[str]:
        """What is counted."""
        return [counter.name for counter in self.counters]

    def read(self) -> Energy:
        """Return joules and seconds since an arbitrary moment."""
        return Energy(sum(counter.joules() for counter in self.counters), self._clock())

    def _measure_idle(self, seconds: float) -> Idle:
        """Return the idle power from the first to the last move of each counter, where its reading is exact."""
        moves: list[list[Energy]] = [[] for _ in self.counters]
        last = [counter.joules() for counter in self.counters]
        end = self._clock() + seconds
        while self._clock() < end:
            self._sleep(POLL_SECONDS)
            for number, counter in enumerate(self.counters):
                joules = counter.joules()
                if joules != last[number]:
                    moves[number].append(Energy(joules, self._clock()))
                    last[number] = joules
        for counter, made in zip(self.counters, moves, strict=True):
            if len(made) < LEAST_MOVES:
                raise NotMeasurable(
                    f"the counter {counter.name} moved {len(made)} times in {seconds:g} s, so it is not kept here, as in many "
                    "virtual machines; measure on the machine itself."
                )
        spans = [(made[-1].since(made[0]), len(made) - 1) for made in moves]
        watts = sum(span.joules / span.seconds for span, _ in spans)
        return Idle(watts, seconds, max(span.seconds / count for span, count in spans))


def resolution_error(update_seconds: float, num_readings: int, seconds: float) -> float:
    """Return half the 95 % interval of a sum of energies that the counter's steps alone cause, as a share of the sum.

    Each of `num_readings` energies is the difference of two readings, each of which is old by up to `update_seconds`. Over
    responses of all lengths that is a variance of update_seconds^2 / 6 for each, at a constant power over `seconds` in all.
    """
    return 1.96 * update_seconds * (num_readings / 6) ** 0.5 / seconds
