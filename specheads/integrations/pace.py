"""How long drafts pay, by what rounds take and what is accepted where they run: learned while
requests are served.

A round takes a constant time, a little for each token that the target verifies, and for each draft
step a time that all requests share. Where `rate` tokens come per second, another step pays as
long as it adds more than come in its time otherwise:

    sum of gains >= rate * (step + verified * drafts that go on)

and one more token of a single draft, in a step that is taken anyway, as long as gain >= rate *
verified. A gain is the probability that the next token is accepted, given the survival that a head
predicts so far, by what was accepted. The rate is that of the rounds that follow these rules, at
the best policy the right one (Dinkelbach 1967). Without the head the gain of a token is that of its
place in the draft, so all drafts have one length, which may be 0. Of the two ways the one that
makes more tokens per second is taken, and the other one tried now and then; they are compared at
the recent times of one of them, or the machine's changes between their rounds would decide. Times
and rates are those of a number of requests, gains those of all.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

KNOTS = 21  # survivals 0, 1/20, ... 1, at which gains are known; they are linear in between
PLACES = 32  # in a draft, whose acceptance is known
FADING = 0.98  # what the round before counts
# Likewise for what is small next to a round's noise: a token's costs, and what one way is faster
# than the other
SLOWLY = 0.998
KNOWN = 12  # rounds after which a number of requests has its own figures
USUAL = 0.8  # the acceptance of tokens until it is known
FREE = 64  # tokens that a target reads in twice the time of one, until it is known
BEGUN = 3  # drafted tokens without the head until times are known
LONGER = 32  # rounds without the head of which one drafts a token more, to see whether it pays
COMPARED = 64  # rounds of each way after which their rates are believed
# rounds in a row, of so many, in which the way that is slower is tried
RUN = 8
PERIOD = 128
# where it is slower by this share, a period is so many times as long
FAR = 0.1
SELDOM = 8
_BELIEVED = 8.0  # tokens that this counts for at each knot
_OUTLIER = 3.0  # times the usual: requests were awaited, or the machine was busy
_PULL = 200.0  # tokens squared, that the guess counts for


class Bounds(NamedTuple):
    """When drafts end; gains are summed over the drafts that go on."""

    step: float  # the least sum of gains for another step
    each: float  # what it needs more for each draft that goes on, and the least gain of one


@dataclass
class _Line:
    """Seconds by tokens, by least squares on differences to the round before, as the machine's
    speed changes slowly.
    """

    square: float = 0.0  # fading sums of differences of tokens, squared, and times those of seconds
    product: float = 0.0
    last: tuple[float, float] | None = None  # tokens and seconds

    def add(self, x: float, y: float) -> None:
        if self.last is not None and x != self.last[0]:
            more = x - self.last[0]
            longer = y - self.last[1]
            self.square = SLOWLY * self.square + more * more
            self.product = SLOWLY * self.product + more * longer
        self.last = x, y

    def slope(self) -> float:
        """Return the slope, 0 or more.

        While tokens differ little, what reading a token costs where memory is what costs.
        """
        if self.last is None:
            return 0.0
        guess = self.last[1] / (FREE + self.last[0])
        return max(0.0, (self.product + _PULL * guess) / (self.square + _PULL))


@dataclass
class _RoundCounts:
    """Counts over the rounds of one number of requests that drafted with the head, or without; all
    but `rounds` fade.
    """

    rounds: int = 0
    weight: float = 0.0  # of the rounds
    emitted: float = 0.0  # tokens
    read: float = 0.0  # tokens that the target has read
    steps: float = 0.0  # of the draft

    def add(self, emitted: int, read: int, steps: int) -> None:
        self.rounds += 1
        self.weight = SLOWLY * self.weight + 1
        self.emitted = SLOWLY * self.emitted + emitted
        self.read = SLOWLY * self.read + read
        self.steps = SLOWLY * self.steps + steps


@dataclass
class _Mean:
    total: float = 0.0
    weight: float = 0.0

    def add(self, seconds: float) -> None:
        self.total = FADING * self.total + seconds
        self.weight = FADING * self.weight + 1

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass
class _Load:
    """What is known of one number of requests.

    Times are those of the faster way, and `longer` compares trials with them.
    """

    # Seconds of a round outside the draft, by the tokens that the target reads.
    line: _Line = field(default_factory=_Line)
    others: _Mean = field(default_factory=_Mean)  # seconds of a round outside the draft
    read: _Mean = field(default_factory=_Mean)  # tokens of these rounds
    # The first step of a round, which also reads what was accepted, and further ones.
    first: _Mean = field(default_factory=_Mean)
    step: _Mean = field(default_factory=_Mean)
    by_head: _RoundCounts = field(default_factory=_RoundCounts)
    fixed: _RoundCounts = field(default_factory=_RoundCounts)
    # Seconds that rounds with the head take more than `expected` says.
    longer: _Mean = field(default_factory=_Mean)
    head_leads: bool = True  # it is the faster way
    is_trial: bool = False  # the round is one of the slower way
    turns: int = 0
    guessed: bool = False  # it began with the figures of another number of requests, which fade

    def scaled(self, factor: float) -> "_Load":
        """Return what is expected of `factor` times as many requests until they are known."""
        made = deepcopy(self)
        for counts in (made.by_head, made.fixed):
            counts.rounds = 0
            counts.emitted *= factor
            counts.read *= factor
        made.turns = 0
        made.guessed = True
        made.is_trial = False
        return made

    @property
    def is_known(self) -> bool:
        return min(self.by_head.rounds, self.fixed.rounds) >= KNOWN

    def expected(self, read: float, steps: float, head: float) -> float:
        """Return the seconds of a round of the faster way.

        `head` are those that a head adds to a step.
        """
        outside = self.others.value + self.line.slope() * (read - self.read.value)
        return outside + self.first.value + self.step.value * max(0.0, steps - 1) + head * steps

    def rate(self, counts: _RoundCounts, head: float) -> float:
        """Return the tokens per second of such rounds."""
        by_head = counts is self.by_head
        weight = counts.weight
        head_seconds = head if by_head else 0.0
        seconds = self.expected(counts.read / weight, counts.steps / weight, head_seconds)
        if by_head != self.head_leads:
            seconds += self.longer.value if by_head else -self.longer.value
        return counts.emitted / weight / seconds

    def asks_head(self, head: float) -> bool:
        """Return whether the head, which adds so many seconds to a step, ends the drafts of the
        next round.
        """
        if not self.is_known:
            return self.by_head.rounds <= self.fixed.rounds
        ratio = self.rate(self.by_head, head) / self.rate(self.fixed, head)
        self.turns = self.turns + 1
        period = PERIOD
        if min(self.by_head.rounds, self.fixed.rounds) < COMPARED:
            period //= 4
        elif not 1 - FAR < ratio < 1 / (1 - FAR):
            period *= SELDOM
        self.head_leads = ratio >= 1
        self.is_trial = self.turns % period < RUN
        return self.head_leads != self.is_trial


class Pace:
    """Learns what rounds take and what is accepted, and says when drafts end.

    Times are seconds of one clock.
    """

    def __init__(self) -> None:
        # Fading numbers of tokens by the survival before them, and of accepted ones.
        self._seen = np.full(KNOTS, _BELIEVED)
        self._accepted = _BELIEVED * USUAL * np.linspace(0, 1, KNOTS)
        # Likewise by their place in the draft, where the head ended no draft before.
        self._reached = np.full(PLACES, _BELIEVED)
        self._passed = _BELIEVED * USUAL * np.ones(PLACES)
        self._loads: dict[int, _Load] = {}
        self._head = _Mean()  # seconds that the head adds to a step
        self._began: float | None = None
        self._ended = self._stepped = 0.0
        self._num_requests = 0
        self._num_steps = 0
        self._by_head = False
        self._steady = False
        self._lengths = np.zeros(0, int)
        self._survivals = np.zeros((0, 0))

    def begin(
        self,
        now: float,
        num_requests: int,
        num_read: int,
        rejected: Sequence[int] | None,
        steady: bool,
    ) -> None:
        """Begin a round's draft, where the round before ends, in which the target has read
        `num_read` tokens of all requests.

        `rejected` are the drafted tokens of each request that were not accepted, None without a
        draft; `steady`: none is new.
        """
        same = steady and num_requests == self._num_requests
        if self._began is not None and same:
            load = self._load(num_requests)
            counts = self._counts(num_requests)
            outside = now - self._ended
            usual = load.expected(num_read, self._num_steps, self._head.value * self._by_head)
            if self._steady and (counts.rounds < KNOWN or now - self._began < _OUTLIER * usual):
                counts.add(num_read - sum(rejected or ()), num_read, self._num_steps)
                if load.is_trial:
                    more = now - self._began - usual
                    load.longer.add(more if self._by_head else -more)
                else:
                    load.others.add(outside)
                    load.read.add(num_read)
                load.line.add(num_read, outside)
            if rejected is not None and len(rejected) == len(self._lengths):
                self._learn(np.asarray(rejected))
        self._steady = same
        self._began = now
        self._stepped = now
        self._num_requests = num_requests
        self._num_steps = 0

    def _learn(self, rejected: np.ndarray) -> None:
        """Learn gains from a round's drafts, of which so many tokens were rejected."""
        accepted = self._lengths - rejected
        places = np.arange(1 if self._by_head else min(PLACES, self._lengths.max(initial=0)))[
            :, None
        ]
        self._fade(
            self._reached,
            self._passed,
            np.minimum(self._lengths, accepted + 1) > places,
            accepted > places,
        )
        steps = np.arange(len(self._survivals))[:, None]
        followed = steps + 1 < self._lengths  # (steps, R): a token came next
        knots = np.rint(self._survivals * (KNOTS - 1)).astype(int)[followed]
        at_knot = np.arange(KNOTS)[:, None] == knots
        self._fade(self._seen, self._accepted, at_knot, at_knot & (steps + 2 <= accepted)[followed])

    @staticmethod
    def _fade(
        seen: np.ndarray, accepted: np.ndarray, is_seen: np.ndarray, is_accepted: np.ndarray
    ) -> None:
        """Add to the first of the fading counts.

        The others stay, as what nobody sees is not forgotten.
        """
        count = is_seen.sum(1)
        fading = FADING ** (count > 0)
        some = slice(len(count))
        seen[some] = fading * seen[some] + count
        accepted[some] = fading * accepted[some] + is_accepted.sum(1)

    def step(self, ended: float, now: float | None = None) -> None:
        """Note the end of a draft step and, with `now`, that of the head's."""
        load = self._load(self._num_requests)
        # Of new requests the first step reads the prompts
        if self._num_steps or (self._steady and not load.is_trial):
            (load.step if self._num_steps else load.first).add(ended - self._stepped)
        if now is not None:
            self._head.add(now - ended)
        self._stepped = ended if now is None else now
        self._num_steps = self._num_steps + 1

    def end(self, now: float, lengths: Sequence[int], survivals: np.ndarray) -> None:
        """Note the end of the drafts (R,) of a round, with the survivals (steps, R) after each of
        the head's tokens.
        """
        self._ended = now
        self._lengths = np.asarray(lengths, int)
        self._survivals = survivals

    def gains(self) -> np.ndarray:
        """Return the gains (KNOTS,), which rise with the survival."""
        return non_decreasing(self._accepted / self._seen, self._seen)

    def length(self, num_requests: int, longest: int) -> int | None:
        """Return how many tokens the next round drafts for each request without the head.

        None: the head decides.
        """
        load = self._load(num_requests)
        self._by_head = load.asks_head(self._head.value)
        if self._by_head:
            return None
        if (bounds := self.bounds(num_requests)) is None:
            return min(BEGUN, longest)
        gains = num_requests * np.cumprod(self._passed / self._reached)
        # The first step is taken anyway
        pays = gains >= bounds.each * num_requests + bounds.step * (np.arange(PLACES) > 0)
        length = PLACES if pays.all() else int(pays.argmin())
        return min(length + (length > 0 and load.fixed.rounds % LONGER == 0), longest)

    def bounds(self, num_requests: int) -> Bounds | None:
        """Return when drafts of the round end; None: too little is known yet."""
        load = self._load(num_requests)
        counts = self._counts(num_requests)
        head = self._head.value
        is_known = counts.rounds >= KNOWN or load.guessed
        if not (counts.weight and load.step.weight and is_known):
            return None
        rate = load.rate(counts, head)
        return Bounds(rate * (load.step.value + head * self._by_head), rate * load.line.slope())

    def _counts(self, num_requests: int) -> _RoundCounts:
        load = self._load(num_requests)
        return load.by_head if self._by_head else load.fixed

    def _load(self, num_requests: int) -> _Load:
        """Return the figures of a number of requests, at first those of the nearest known one."""
        if num_requests not in self._loads:
            new = _Load()
            known = [number for number, load in self._loads.items() if load.is_known]
            if known:
                nearest = min(known, key=lambda number: abs(number - num_requests))
                new = self._loads[nearest].scaled(num_requests / nearest)
            self._loads[num_requests] = new
        return self._loads[num_requests]


def non_decreasing(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the closest values that never fall, by weighted least squares (pooling adjacent
    violators).
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, value_weight in zip(values.tolist(), weight.tolist(), strict=True):
        pools.append((value, value_weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, less, some) = pools.pop()
            (high, more, others) = pools.pop()
            pools.append(((low * less + high * more) / (less + more), less + more, some + others))
    return np.concatenate([np.full(members, mean) for mean, _, members in pools])
