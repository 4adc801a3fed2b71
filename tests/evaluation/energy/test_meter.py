import numpy as np
import pytest
from energy_fakes import Counter, Machine

from specheads.evaluation.energy.meter import EnergyMeter, NotMeasurable, resolution_error


def meter_of(*counters, seconds=3.0):
    machine = counters[0].machine
    return EnergyMeter(counters, seconds, machine.clock, machine.sleep)


def test_the_idle_power_is_exact_however_coarse_the_counters_are():
    machine = Machine(now=0.037)
    meter = meter_of(Counter(machine, "GPU", 80.0, 0.1), Counter(machine, "memory", 5.0, 0.02))
    assert meter.idle.watts == pytest.approx(85, rel=0.01)
    assert meter.idle.update_seconds == pytest.approx(0.1, rel=0.02)  # of the slowest
    assert meter.idle.seconds == 3.0 and machine.now == pytest.approx(3.037, abs=0.002)
    assert meter.names == ["GPU", "memory"]


def test_a_reading_is_the_sum_of_all_counters():
    machine = Machine()
    counters = [Counter(machine, "package-0", 20.0, 0.001), Counter(machine, "package-1", 10.0, 0.001)]
    meter = meter_of(*counters)
    start = meter.read()
    for counter in counters:
        counter.watts = 0.0
    stopped = meter.read()
    for counter, watts in zip(counters, (20.0, 10.0), strict=True):
        counter.watts = watts
    machine.sleep(4.0)
    taken = meter.read().since(start)
    assert stopped.joules == 0
    assert taken.joules == pytest.approx(120, abs=0.1) and taken.seconds == pytest.approx(4)


def test_a_counter_that_stands_still_cannot_be_used():
    machine = Machine()
    with pytest.raises(NotMeasurable, match=r"package-0 moved 0 times in 3 s"):
        meter_of(Counter(machine, "package-0", 0.0, 0.001))


def test_the_resolution_error_is_that_of_responses_of_all_lengths():
    """4,000 seeded sums of 32 responses; the estimate of their spread is off by more than 5 % once in ten thousand seeds."""
    update, rng = 0.1, np.random.default_rng(0)
    starts, lengths = rng.uniform(0, 100, (4_000, 32)), rng.uniform(0.3, 0.5, (4_000, 32))
    counted = update * (np.floor((starts + lengths) / update) - np.floor(starts / update))
    errors = (counted - lengths).sum(axis=1)
    assert errors.mean() == pytest.approx(0, abs=0.03)  # more than six standard errors
    assert 1.96 * errors.std() == pytest.approx(resolution_error(update, 32, 12.8) * 12.8, rel=0.05)
