"""Intervals over prompts by the bootstrap: whole prompts are drawn anew, the same draws for every setting."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specheads.decoding.records import DecodeStats
from specheads.evaluation.sweep import Measured
from specheads.replay.cost import Costs
from specheads.replay.replay import Counts

NUM_RESAMPLES = 2_000
LEVEL = 0.95
NUM_BINS = 1_000


@dataclass(frozen=True)
class Interval:
    """An estimate with the limits of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Sums:
    """Sums over prompts of one setting's counts and seconds, prompts not counted: arrays (R,), one entry per resample."""

    tokens: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    discarded: np.ndarray
    draft_calls: np.ndarray
    target_calls: np.ndarray
    seconds: np.ndarray | None = None  # None where it was replayed

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
        """Return tokens per second by the costs."""
        return self.tokens / costs.seconds(self.draft_calls, self.target_calls, self.drafted)


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
    columns = ("num_tokens", "num_drafted", "num_accepted", "num_discarded", "num_draft_calls", "num_target_calls")
    table = [[*(getattr(part, name) for name in columns), part.decode_seconds] for part in stats]
    table = np.array(table, dtype=float)
    return Sums(*(counts @ table).T)


def replayed_sums(found: Counts, counts: np.ndarray) -> Sums:
    """Return one replayed rule's sums under each row of `counts`."""
    columns = (found.tokens, found.drafted, found.accepted, found.discarded, found.drafted, found.target_calls)
    return Sums(*(counts @ np.stack(columns, axis=1)).T)


def auroc_samples(scores: np.ndarray, accepted: np.ndarray, prompt: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the AUROC (1 + R,) of scores (n,) of tokens of prompts (n,) under each row of `counts`, against `accepted` (n,) bool.

    Scores are put into NUM_BINS bins of about as many tokens each, within which all count as equal: that is what makes resampling
    whole prompts cheap, and moves the AUROC by far less than its interval.
    """
    order = np.unique(scores, return_inverse=True)[1]
    place = prompt * NUM_BINS + order * NUM_BINS // (order.max() + 1)
    shape = counts.shape[1], NUM_BINS
    kept, rejected = (
        counts @ np.bincount(place[which], minlength=shape[0] * shape[1]).reshape(shape) for which in (accepted, ~accepted)
    )
    below = rejected.cumsum(1) - rejected / 2
    return (kept * below).sum(1) / (kept.sum(1) * rejected.sum(1))


def mean_samples(values: np.ndarray, prompt: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the mean (1 + R,) of values (n,) of tokens of prompts (n,) under each row of `counts`."""
    totals, sizes = (np.bincount(prompt, weights, counts.shape[1]) for weights in (values, None))
    return (counts @ totals) / (counts @ sizes)


def interval(values: np.ndarray) -> Interval:
    """Return the estimate (entry 0) and the percentile interval of the resamples."""
    low, high = np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(values[0]), float(low), float(high))


def gain_over_fixed(measured: Sequence[Measured], costs: Costs) -> Interval | None:
    """Return the head's predicted throughput over that of the best fixed length, as a ratio; None without both families."""
    families = {name: [m for m in measured if m.setting.family.startswith(name)] for name in ("fixed_length", "head_threshold")}
    if not all(families.values()) or len(measured[0].stats) < 4:
        return None
    columns = ("num_tokens", "num_draft_calls", "num_target_calls", "num_drafted")
    fixed, head = (
        np.array([[[getattr(part, name) for name in columns] for part in m.stats] for m in members], dtype=float)
        for members in families.values()
    )
    return cross_fitted_gain(head, fixed, costs)


def cross_fitted_gain(ours: np.ndarray, theirs: np.ndarray, costs: Costs) -> Interval:
    """Return how much faster the best setting of one family is than the best of another, as a ratio of throughputs.

    The best is chosen on one half of the prompts and judged on the other, and the halves then swapped, so that the larger
    family has no advantage from being searched.

    Args:
        ours, theirs: (settings, P, 4): tokens, draft forwards, target forwards and drafted tokens of each prompt.
    """
    num_prompts = ours.shape[1]
    counts = resample_counts(num_prompts)
    even = np.arange(num_prompts) % 2 == 0
    seconds_per_token = []
    for family in (ours, theirs):
        totals = np.zeros((len(counts), 4))
        for half in (even, ~even):
            best = int(np.argmin(_seconds_per_token(family[:, half].sum(axis=1), costs)))
            totals += (counts * ~half) @ family[best]
        seconds_per_token.append(_seconds_per_token(totals, costs))
    return interval(seconds_per_token[1] / seconds_per_token[0])


def _seconds_per_token(totals: np.ndarray, costs: Costs) -> np.ndarray:
    tokens, draft_calls, target_calls, drafted = totals.T
    return costs.seconds(draft_calls, target_calls, drafted) / tokens
