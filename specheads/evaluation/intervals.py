"""Intervals over prompts by the bootstrap: whole prompts are drawn anew, the same draws for every setting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specheads.decoding.records import DecodeStats
from specheads.evaluation.sweep import Measured
from specheads.replay.cost import Costs, throughput

NUM_RESAMPLES = 2_000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with the limits of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Sums:
    """Sums over prompts of one setting's counts and seconds: arrays (R,), one entry per resample."""

    tokens: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    discarded: np.ndarray
    target_calls: np.ndarray
    seconds: np.ndarray

    @property
    def discard_rate(self) -> np.ndarray:
        return self.discarded / self.tokens

    @property
    def verification_rate(self) -> np.ndarray:
        return self.target_calls / self.tokens

    @property
    def tokens_per_second(self) -> np.ndarray:
        return self.tokens / self.seconds

    def predicted(self, costs: Costs) -> np.ndarray:
        return throughput(self.discard_rate, self.verification_rate, costs)


def resample_counts(num_prompts: int, seed: int = 0) -> np.ndarray:
    """Return (1 + R, P): how often each prompt is in each resample; row 0 is the sample itself.

    Even and odd prompts are drawn apart, so that neither half is ever empty.
    """
    rng = np.random.default_rng(seed)
    draws = np.zeros((NUM_RESAMPLES, num_prompts))
    for half in (slice(0, None, 2), slice(1, None, 2)):
        size = len(range(num_prompts)[half])
        if size:
            draws[:, half] = rng.multinomial(size, np.full(size, 1 / size), size=NUM_RESAMPLES)
    return np.concatenate([np.ones((1, num_prompts)), draws])


def sums(stats: Sequence[DecodeStats], counts: np.ndarray) -> Sums:
    """Return one setting's sums under each row of `counts`."""
    columns = ("num_tokens", "num_drafted", "num_accepted", "num_discarded", "num_target_calls", "seconds")
    table = np.array([[getattr(part, name) for name in columns] for part in stats], dtype=float)
    return Sums(*(counts @ table).T)


def interval(values: np.ndarray) -> Interval:
    """Return the estimate (entry 0) and the percentile interval of the resamples."""
    low, high = np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(values[0]), float(low), float(high))


def gain_over_fixed(measured: Sequence[Measured], costs: Costs) -> Interval | None:
    """Return the head's predicted throughput over that of the best fixed length, as a ratio; None without both families.

    Threshold and length are both chosen on one half of the prompts and judged on the other, and the halves then swapped, so
    that the larger family has no advantage from being searched.
    """
    families = {name: [m for m in measured if m.setting.family == name] for name in ("fixed", "head")}
    num_prompts = len(measured[0].stats)
    if not all(families.values()) or num_prompts < 4:
        return None
    counts = resample_counts(num_prompts)
    even = np.arange(num_prompts) % 2 == 0
    times = {}  # the time per token of each family's choices, over both halves
    for name, members in families.items():
        seconds, tokens = np.zeros(len(counts)), np.zeros(len(counts))
        for half in (even, ~even):
            best = max(members, key=_predicted_on(half[None].astype(float), costs))
            there = sums(best.stats, counts * ~half)
            seconds += there.tokens / there.predicted(costs)
            tokens += there.tokens
        times[name] = seconds / tokens
    return interval(times["fixed"] / times["head"])


def _predicted_on(counts: np.ndarray, costs: Costs) -> Callable[[Measured], float]:
    return lambda measured: float(sums(measured.stats, counts).predicted(costs)[0])
