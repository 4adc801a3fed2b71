"""Intervals over prompts by the bootstrap.

Whole groups of prompts, such as those of one file, which are alike, are resampled.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypedDict

import numpy as np

from specheads.decoding.records import DecodeStats
from specheads.replay.replay import Counts

NUM_RESAMPLES = 2_000
LEVEL = 0.95
LEVELS = (50, 90, 99)  # percentiles of times


@dataclass(frozen=True)
class Interval:
    """An estimate with the limits of its 95 % interval."""

    value: float
    low: float
    high: float


class Rates(TypedDict):
    """What rows of reports have of a setting, besides its speed."""

    discard_rate: Interval
    verification_rate: Interval
    block_efficiency: float
    acceptance_rate: float | None  # None where nothing was drafted


@dataclass(frozen=True)
class Sums:
    """Sums of one setting's counts, and of seconds without the reading of prompts, over prompts:
    (R,), one for each resample.
    """

    tokens: np.ndarray
    drafted: np.ndarray
    discarded: np.ndarray
    target_calls: np.ndarray
    seconds: np.ndarray | None = None  # None where it was replayed

    @property
    def verification_rate(self) -> np.ndarray:
        return self.target_calls / self.tokens

    @property
    def tokens_per_second(self) -> np.ndarray:
        return self.tokens / self.seconds

    def rates(self) -> Rates:
        """Return the rates that rows of reports have."""
        drafted = self.drafted[0]
        discarded = self.discarded[0]
        return {
            "discard_rate": interval(self.discarded / self.tokens),
            "verification_rate": interval(self.verification_rate),
            "block_efficiency": float(1 / self.verification_rate[0]),
            "acceptance_rate": float((drafted - discarded) / drafted) if drafted else None,
        }


Groups = Sequence[Hashable]  # the group of each prompt


def halves(groups: Groups) -> np.ndarray:
    """Return for each prompt (P,) whether it is in the first of two halves of about equal size,
    which share no group.
    """
    number = _numbered(groups)
    members = np.bincount(number)
    first = np.zeros(len(members), dtype=bool)
    sizes = [0, 0]
    for group, size in enumerate(members):
        first[group] = sizes[0] <= sizes[1]
        sizes[0 if first[group] else 1] += size
    return first[number]


def _numbered(groups: Groups) -> np.ndarray:
    """Return the number of each prompt's group (P,), in the order in which groups come."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return np.array([numbers[group] for group in groups])


def resample_counts(groups: Groups) -> np.ndarray:
    """Return (1 + R, P): how often each prompt is in each resample; row 0 is the sample itself.

    Prompts of a group are in a resample equally often. Both `halves` are resampled separately, so
    that neither is ever empty. It has two groups fewer, with more weight: one fewer makes variances
    unbiased (Rao and Wu 1988), two widen as Student's t does.
    """
    rng = np.random.default_rng(0)
    number = _numbered(groups)
    first = halves(groups)
    resampled = np.zeros((NUM_RESAMPLES, len(number)))  # by group
    for half in (first, ~first):
        members = np.unique(number[half])
        if size := len(members):
            drawn = max(size - 2, 1)
            resampled[:, members] = (
                size / drawn * rng.multinomial(drawn, np.full(size, 1 / size), size=NUM_RESAMPLES)
            )
    return np.concatenate([np.ones((1, len(number))), resampled[:, number]])


def sums(spent: Counts | Sequence[DecodeStats], resamples: np.ndarray) -> Sums:
    """Return one setting's sums under each row of `resamples`, of what was replayed or decoded."""
    if isinstance(spent, Counts):
        table = np.stack([spent.tokens, spent.drafted, spent.discarded, spent.target_calls], axis=1)
    else:
        columns = attrgetter(
            "num_tokens", "num_drafted", "num_discarded", "num_target_calls", "decode_seconds"
        )
        table = np.array([columns(part) for part in spent])
    return Sums(*(resamples @ table).T)


def interval(values: np.ndarray, best_of: int = 1) -> Interval:
    """Return the estimate (entry 0) and the percentile interval of the resamples.

    The best of `best_of` estimates is above its own interval more often than one estimate is: each
    is widened (Bonferroni) so that all of them together cover the truth as often as one does.
    """
    outside = (1 - LEVEL) / 2 / max(best_of, 1)
    low, high = np.quantile(values[1:], [outside, 1 - outside])
    return Interval(float(values[0]), float(low), float(high))


def is_clearly_faster(ratio: Interval | None) -> bool:
    """Whether a ratio of speeds is above 1 by more than chance; None: nothing was compared."""
    return ratio is not None and ratio.low > 1


def milliseconds(seconds: np.ndarray) -> dict[str, float]:
    """Return the percentiles p50, p90 and p99 of seconds, in milliseconds."""
    return {f"p{level}": float(1e3 * np.percentile(seconds, level)) for level in LEVELS}
