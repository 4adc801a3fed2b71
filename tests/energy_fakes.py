"""Counters of energy on a clock that tests move, and files as Linux shows them."""

import numpy as np

from specheads.evaluation.energy.meter import Energy

RANGE = 262_143_328_850  # of a real package, in microjoules


class Machine:
    """A clock that only `sleep` moves, and counters that move in steps of the clock."""

    def __init__(self, now=0.0):
        self.now = now

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Counter:
    def __init__(self, machine, name, watts, update_seconds):
        self.machine, self.name, self.watts, self.update_seconds = machine, name, watts, update_seconds

    def joules(self):
        return self.watts * self.update_seconds * np.floor(self.machine.now / self.update_seconds)


def tree(folder, zones):
    """Write powercap zones, {folder: (name, microjoules)}."""
    for place, (name, microjoules) in zones.items():
        zone = folder / place
        zone.mkdir(parents=True)
        (zone / "name").write_text(f"{name}\n")
        (zone / "max_energy_range_uj").write_text(f"{RANGE}\n")
        set_to(folder, place, microjoules)
    return folder


def set_to(folder, place, microjoules):
    (folder / place / "energy_uj").write_text(f"{microjoules}\n")


class CountingMeter:
    """A meter by which every response takes the same joules and seconds: each second reading ends a response."""

    def __init__(self, joules, seconds, idle=None):
        self.step, self.readings, self.idle, self.names = Energy(joules, seconds), 0, idle, ["a counter"]

    def read(self):
        self.readings += 1
        return Energy(*(value * (self.readings // 2) for value in self.step))
