"""Every policy at every load: values are chosen on dev prompts, and reported on others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specheads.decoding.load.costs import LoadCosts
from specheads.evaluation.intervals import Interval
from specheads.evaluation.serving.candidates import FIXED, Family, Value, by_batch_size
from specheads.evaluation.serving.recorded_drafts import RecordedDrafts
from specheads.evaluation.serving.results import ServingResult, gain, over_seeds, result_of
from specheads.evaluation.serving.simulation import Simulation
from specheads.evaluation.serving.traffic import Traffic, closed_loop, poisson
from specheads.replay.recording import Recording

LEAST_REQUESTS = 60
DEV_SEED = 1_000_000  # of the simulations on dev prompts, unlike those of any reported one

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Load:
    """One load: a closed loop of `requests` at once, or an open one in which `rate` arrive per second."""

    requests: int  # in the batch at most
    rate: float | None = None
    burst: int = 1
    turnover: int = 3  # requests for each place of a closed loop

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.rate is None:
            return f"{self.requests} at once"
        return f"{self.rate:g} per second" + (f" in bursts of {self.burst}" if self.burst > 1 else "")

    def traffic(self, recording: Recording, seed: int) -> Traffic:
        """Return the requests, of responses in a recording."""
        if self.rate is None:
            count = self.requests + max(self.turnover * self.requests, LEAST_REQUESTS)
            return closed_loop(recording, self.requests, count, seed)
        return poisson(recording, self.rate, self.turnover * LEAST_REQUESTS, self.requests, seed, self.burst)


@dataclass(frozen=True)
class PolicyRow:
    """One family at one load: the value that was best on dev prompts, and its results on the others, with intervals over seeds.

    `over_fixed` is its total throughput over that of the best fixed K for this load, 1 is equal.
    """

    family: str
    value: Value  # empty: nothing was chosen
    lossless: bool
    numbers: Mapping[str, Interval]
    over_fixed: Interval


@dataclass(frozen=True)
class LoadTable:
    """All policies at one load."""

    load: str
    requests: int  # in the batch at most
    alone: float | None  # tokens per second of the target alone; None in open loops, where arrivals decide the throughput
    rows: Sequence[PolicyRow]

    def row(self, family: str) -> PolicyRow:
        """Return the row of one family."""
        return next(row for row in self.rows if row.family == family)


@dataclass(frozen=True)
class Study:
    """The recordings and costs that policies are compared on."""

    dev: Recording
    test: Recording
    costs: LoadCosts
    num_seeds: int

    def run(self, families: Sequence[Family], loads: Sequence[Load], advance: Advance = lambda count: None) -> list[LoadTable]:
        """Return the table of every load; `advance` is called with the number of loads that are done.

        Fixed lengths are chosen for all closed loops first, because one policy has the table of them.
        """
        fixed = next(family for family in families if family.name == FIXED)
        best = {load: best_value(fixed, load, self.dev, self.costs) for load in loads}
        closed = {load.requests: int(value[0]) for load, value in best.items() if load.rate is None}
        # Without a closed loop there is no table of fixed lengths by batch size.
        others = [family for family in families if family is not fixed] + ([by_batch_size(closed)] if closed else [])
        tables = []
        for load in loads:
            tables.append(self._table(load, fixed, best[load], others))
            advance(1)
        return tables

    def _table(self, load: Load, fixed: Family, length: Value, others: Sequence[Family]) -> LoadTable:
        base, alone = self._results(fixed, length, load), None
        if load.rate is None:
            alone = over_seeds(self._results(fixed, (0,), load))["tokens_per_second"].value
        rows = [_row(fixed, length, base, base)]
        for family in others:
            value = best_value(family, load, self.dev, self.costs)
            rows.append(_row(family, value, self._results(family, value, load), base))
        return LoadTable(load.name, load.requests, alone, rows)

    def _results(self, family: Family, value: Value, load: Load) -> list[ServingResult]:
        seeds = range(self.num_seeds)
        return [_simulated(family, value, load, self.test, load.traffic(self.test, seed), self.costs) for seed in seeds]


def best_value(family: Family, load: Load, dev: Recording, costs: LoadCosts) -> Value:
    """Return the value with the highest throughput on dev prompts."""
    if len(family.values) == 1:
        return family.values[0]
    traffic = load.traffic(dev, DEV_SEED)
    return max(family.values, key=lambda value: _simulated(family, value, load, dev, traffic, costs).tokens_per_second)


def _simulated(
    family: Family, value: Value, load: Load, recording: Recording, traffic: Traffic, costs: LoadCosts
) -> ServingResult:
    policy = family.make(value, load.requests)
    served = Simulation(RecordedDrafts(recording, policy.needs), traffic, costs, policy).run()
    return result_of(served, traffic, recording.lengths.numpy())


def _row(family: Family, value: Value, results: Sequence[ServingResult], base: Sequence[ServingResult]) -> PolicyRow:
    return PolicyRow(family.name, value, family.lossless, over_seeds(results), gain(results, base))
