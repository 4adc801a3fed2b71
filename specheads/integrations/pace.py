"""How long drafts pay, by what rounds take and what is accepted where they run: learned while requests are served.

A round takes a time of its own, a little for each token that the target verifies, and for each draft step a time that all
requests share. Where `rate` tokens come per second, another step pays as long as it adds more than come in its time otherwise:

    sum of gains >= rate * (step + verified * drafts that go on)

and one more token of a single draft, in a step that is taken anyway, as long as gain >= rate * verified. A gain is the
probability that the next token is accepted, given the survival that a head predicts so far; what was accepted tells it. So a
head's errors matter less: one that learned from sampled drafts is much too confident of drafts by argmax. The rate is that of the
rounds that follow these rules, which at the best policy is the right one (Dinkelbach 1967). Times and rates are those of a number
of requests, gains those of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

KNOTS = 21  # survivals 0, 1/20, ... 1, at which gains are known; they are linear in between
FADING = 0.98  # what the round before counts
KNOWN = 12  # rounds after which a number of requests has its own figures
EXPLORED = 64  # rounds after which a draft is tried where none pays
USUAL = 0.8  # the acceptance of tokens until it is known
_BELIEVED = 8.0  # tokens that this counts for at each knot
FREE = 64  # tokens that a target reads in twice the time of one, until it is known
SLOWLY = 0.998  # FADING of what a token costs, which is small next to a round's noise
_OUTLIER = 3.0  # times the usual: requests were awaited, or the machine was busy
_PULL = 1000.0  # tokens squared, that the guess counts for


class Bounds(NamedTuple):
    """When drafts end; gains are summed over the drafts that go on."""

    alone: float  # the least gain of one
    step: float  # the least sum of gains for another step, and what it needs more for each draft that goes on
    each: float


@dataclass
class _Line:
    """Seconds by tokens, by least squares."""

    sums: np.ndarray = field(default_factory=lambda: np.zeros(5))  # of 1, x, y, x x, x y

    def add(self, x: float, y: float) -> None:
        self.sums = SLOWLY * self.sums + (1.0, x, y, x * x, x * y)

    def slope(self) -> float:
        """Return the slope, 0 or more; while tokens differ little, what reading a token costs where memory is what costs."""
        count, x, y, xx, xy = self.sums
        if not count:
            return 0.0
        guess = y / (FREE * count + x)
        return float(max(0.0, (xy - x * y / count + _PULL * guess) / (xx - x * x / count + _PULL)))


@dataclass
class _Load:
    """Fading sums over the rounds of one number of requests."""

    rounds: int = 0
    tokens: float = 0.0  # emitted
    seconds: float = 0.0  # of whole rounds
    others: _Line = field(default_factory=_Line)  # seconds of a round outside the draft, by the tokens that the target reads
    steps: float = 0.0  # seconds of draft steps but the first of a round, which also reads what was accepted
    num_steps: float = 0.0
    idle: int = 0  # rounds in a row without a draft
    guessed: bool = False  # it began with the figures of another number of requests, which fade

    def scaled(self, factor: float) -> "_Load":
        """Return what is expected of `factor` times as many requests until they are known."""
        return _Load(0, self.tokens * factor, self.seconds, _Line(self.others.sums), self.steps, self.num_steps, guessed=True)


class Pace:
    """Learns what rounds take and what is accepted, and says when drafts end. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._seen = np.full(KNOTS, _BELIEVED)  # fading numbers of tokens by the survival before them, and of accepted ones
        self._accepted = _BELIEVED * USUAL * np.linspace(0, 1, KNOTS)
        self._first = np.array([_BELIEVED * USUAL, _BELIEVED])  # first tokens: accepted, and all
        self._loads: dict[int, _Load] = {}
        self._began: float | None = None
        self._ended = self._stepped = 0.0
        self._num_requests = 0
        self._lengths, self._survivals = np.zeros(0, int), np.zeros((0, 0))

    def begin(self, now: float, num_requests: int, num_read: int, rejected: Sequence[int] | None, steady: bool) -> None:
        """Begin a round's draft, where the round before ends.

        Args:
            num_read: tokens that the target has read for all requests.
            rejected: drafted tokens of each request that were not accepted; None: nothing was drafted.
            steady: no request is new.
        """
        if self._began is not None and steady and num_requests == self._num_requests:
            load, whole = self._load(num_requests), now - self._began
            emitted = num_read - sum(rejected or ())
            usual = load.seconds / load.tokens * emitted if load.rounds >= KNOWN else whole
            if whole < _OUTLIER * usual:
                load.rounds += 1
                load.tokens = FADING * load.tokens + emitted
                load.seconds = FADING * load.seconds + whole
                load.others.add(num_read, now - self._ended)
            if rejected is not None and len(rejected) == len(self._lengths):
                self._learn(np.asarray(rejected))
        self._began, self._stepped, self._num_requests = now, now, num_requests

    def _learn(self, rejected: np.ndarray) -> None:
        """Learn gains from a round's drafts, of which so many tokens were rejected."""
        accepted = self._lengths - rejected
        self._first = FADING * self._first + ((accepted >= 1).sum(), (self._lengths >= 1).sum())
        steps = np.arange(len(self._survivals))[:, None]
        followed = steps + 1 < self._lengths  # (steps, R): a token came next
        knots = np.rint(self._survivals * (KNOTS - 1)).astype(int)[followed]
        hit = (steps + 2 <= accepted)[followed]
        fading = FADING ** (np.bincount(knots, minlength=KNOTS) > 0)  # what nobody sees is not forgotten
        self._seen = fading * self._seen + np.bincount(knots, minlength=KNOTS)
        self._accepted = fading * self._accepted + np.bincount(knots, weights=hit, minlength=KNOTS)

    def step(self, now: float, is_first: bool) -> None:
        """Note the end of a draft step."""
        if not is_first:
            load = self._load(self._num_requests)
            load.steps = FADING * load.steps + now - self._stepped
            load.num_steps = FADING * load.num_steps + 1
        self._stepped = now

    def end(self, now: float, lengths: Sequence[int], survivals: np.ndarray) -> None:
        """Note the end of the drafts (R,) of a round, with the survivals (steps, R) after each of their tokens."""
        self._ended, self._lengths, self._survivals = now, np.asarray(lengths, int), survivals

    def gains(self) -> np.ndarray:
        """Return the gains (KNOTS,), which rise with the survival: neighbours of which the lower gains more share their mean."""
        pools: list[tuple[float, float, int]] = []  # accepted, seen, knots
        for accepted, seen in zip(self._accepted, self._seen, strict=True):
            pool = float(accepted), float(seen), 1
            while pools and pools[-1][0] * pool[1] > pool[0] * pools[-1][1]:
                before = pools.pop()
                pool = before[0] + pool[0], before[1] + pool[1], before[2] + pool[2]
            pools.append(pool)
        return np.repeat([accepted / seen for accepted, seen, _ in pools], [knots for *_, knots in pools])

    def bounds(self, num_requests: int) -> Bounds | None:
        """Return when drafts of a round of this many requests end; None: too little is known yet."""
        load = self._load(num_requests)
        if not (load.tokens and load.num_steps and (load.rounds >= KNOWN or load.guessed)):
            return None
        rate, verified = load.tokens / load.seconds, load.others.slope()
        return Bounds(rate * verified, rate * load.steps / load.num_steps, rate * verified)

    def drafts(self, num_requests: int) -> bool:
        """Return whether drafts of one token pay, which take no step of their own; now and then they are tried in any case."""
        bounds, load = self.bounds(num_requests), self._load(num_requests)
        pays = bounds is None or self._first[0] / self._first[1] >= bounds.each or load.idle >= EXPLORED
        load.idle = 0 if pays else load.idle + 1
        return pays

    def _load(self, num_requests: int) -> _Load:
        """Return the figures of a number of requests, at first those of the nearest known one."""
        if num_requests not in self._loads:
            known = [number for number, load in self._loads.items() if load.rounds >= KNOWN]
            nearest = min(known, key=lambda number: abs(number - num_requests), default=None)
            new = _Load() if nearest is None else self._loads[nearest].scaled(num_requests / nearest)
            self._loads[num_requests] = new
        return self._loads[num_requests]
