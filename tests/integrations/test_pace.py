"""What is learned from rounds, in a simulation where times and chances are known, and the rules
that follow from it.
"""

import numpy as np
import pytest

from specheads.integrations.pace import KNOTS, KNOWN, PERIOD, RUN, SELDOM, Pace

LONGEST = 8


class World:
    """Rounds whose times are known.

    Tokens are accepted at rates that a head predicts, or overrates by `confidence`.
    """

    def __init__(
        self,
        base=10.0,
        verified=0.1,
        first=1.0,
        step=1.0,
        head=0.0,
        confidence=1.0,
        easy=0.95,
        hard=0.35,
        noise=0.0,
    ):
        self.base = base
        self.verified = verified
        self.first = first
        self.further = step
        self.head = head
        self.confidence = confidence
        self.rates = (easy, hard)
        self.noise = noise
        self.rng = np.random.default_rng(0)
        self.now = 0.0
        self.pace = Pace()
        self.tokens = 0
        self.steps = 0
        self.drafted = 0
        self.lengths = []

    def round(self, num_requests):
        """Do one round as the pace says."""
        rates = self.rng.choice(self.rates, size=num_requests)
        rejects = self.rng.random((LONGEST, num_requests)) > rates
        accepted_most = np.where(rejects.any(0), rejects.argmax(0), LONGEST)
        fixed = self.pace.length(num_requests, LONGEST)
        self.lengths.append(fixed)
        survival = np.ones(num_requests)
        going = np.ones(num_requests, bool)
        lengths = np.zeros(num_requests, int)
        survivals = []
        bounds = self.pace.bounds(num_requests)
        for step in range(LONGEST if fixed is None else fixed):
            self.now += self.first if step == 0 else self.further
            if fixed is None:
                self.now += self.head
                self.pace.step(self.now - self.head, self.now)
            else:
                self.pace.step(self.now)
            lengths = lengths + going
            survival = survival * rates ** (1 / self.confidence)
            survivals.append(survival)
            if bounds is not None and fixed is None:
                gains = np.interp(survival, np.linspace(0, 1, KNOTS), self.pace.gains())
                going = going & (gains >= bounds.each)
                if not going.any() or gains[going].sum() < bounds.step + bounds.each * going.sum():
                    break
        steps = len(survivals)
        shown = (
            np.array(survivals).reshape(steps, num_requests)
            if fixed is None
            else np.zeros((0, num_requests))
        )
        self.pace.end(self.now, lengths, shown)
        read = num_requests + lengths.sum()
        self.now += (self.base + self.verified * read) * (1 + self.noise * self.rng.random())
        accepted = np.minimum(accepted_most, lengths)
        rejected = (lengths - accepted).tolist() if lengths.any() else None
        self.pace.begin(self.now, num_requests, int(read), rejected, True)
        self.tokens += num_requests + accepted.sum()
        self.steps = self.steps + steps
        self.drafted = self.drafted + lengths.sum()

    def rate_of(self, num_requests, count):
        start = self.now
        tokens = self.tokens
        for _ in range(count):
            self.round(num_requests)
        return (self.tokens - tokens) / (self.now - start)


def best_fixed(num_requests, **world):
    """Return the rate of the best fixed length, none included, in expectation."""
    costs = World(**world)
    rates = np.array(costs.rates)[:, None]
    best = 0.0
    for length in range(LONGEST + 1):
        emitted = num_requests * (1 + (rates ** np.arange(1, length + 1)).sum(1).mean())
        drafting = costs.first + (length - 1) * costs.further if length else 0.0
        noise = 1 + costs.noise / 2
        best = max(
            best,
            emitted
            / (drafting + noise * (costs.base + costs.verified * num_requests * (1 + length))),
        )
    return best


def test_a_heads_confidence_is_put_right():
    """Drafts by argmax of a head that learned from sampled ones: it believes in far too much."""
    world = World(confidence=3.0)
    world.rates = np.linspace(0.1, 0.99, 90)
    world.pace.length = lambda *given: None
    world.pace.bounds = lambda num_requests: None
    world.pace._by_head = True
    world.rate_of(8, 500)
    gains = world.pace.gains()
    # After k tokens of a request that accepts at rate r, the head's survival is r^(k/3), and the
    # next token's chance r^(k+1).
    for survival in (0.5, 0.7, 0.9):
        low = survival**6
        high = survival ** (3 * LONGEST / (LONGEST - 1))
        assert low - 0.05 < np.interp(survival, np.linspace(0, 1, KNOTS), gains) < high + 0.05
    assert (np.diff(gains) >= 0).all()


@pytest.mark.parametrize("num_requests", [1, 4, 16, 64])
@pytest.mark.parametrize("confidence", [1.0, 2.0])
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("head", [0.0, 0.5])
def test_the_pace_is_at_least_that_of_the_best_fixed_length(num_requests, confidence, noise, head):
    world = World(confidence=confidence, noise=noise, head=head)
    world.rate_of(num_requests, 400)
    made = world.rate_of(num_requests, 3000 if num_requests < 16 else 1000)
    assert made > 0.99 * best_fixed(num_requests, confidence=confidence, noise=noise)
    if num_requests == 1 and not head:
        assert made > 1.05 * best_fixed(1, confidence=confidence, noise=noise)


@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_a_head_that_knows_nothing_costs_little(num_requests):
    world = World(easy=0.7, hard=0.7, head=3.0)
    world.rate_of(num_requests, 400)
    world.lengths.clear()
    made = world.rate_of(num_requests, 3000)
    assert made > 0.985 * best_fixed(num_requests, easy=0.7, hard=0.7)
    assert world.lengths.count(None) < 0.1 * len(world.lengths)


def test_nothing_is_drafted_where_no_draft_pays():
    world = World(verified=5.0, base=1.0, easy=0.3, hard=0.1)
    world.rate_of(16, 2 * KNOWN + 4 * PERIOD)
    world.lengths.clear()
    world.rate_of(16, 2 * PERIOD * SELDOM)
    assert world.lengths.count(None) == 2 * RUN  # the head is tried now and then
    assert set(world.lengths) == {None, 0}


def test_other_numbers_of_requests_begin_with_what_is_known():
    world = World()
    world.pace.length(4, LONGEST)
    assert world.pace.bounds(4) is None
    world.rate_of(4, 100)
    world.pace.length(4, LONGEST)
    known = world.pace.bounds(4)
    by_head = world.pace._by_head
    world.pace.length(8, LONGEST)
    if world.pace._by_head != by_head:
        world.pace._load(8).by_head.rounds += 1
        world.pace.length(8, LONGEST)
    # Twice the tokens, some of whose time grows
    assert 1.5 * known.step < world.pace.bounds(8).step < 2 * known.step
    for _ in range(3):  # and go on with it until they have their own
        world.round(8)
        assert world.pace.bounds(8) is not None


def test_rounds_with_new_requests_do_not_count():
    pace = Pace()
    for number in range(20):
        pace.begin(float(number), 4, 8, [1, 0, 0, 0], steady=False)
        pace.length(4, LONGEST)
        pace.step(number + 0.1)
        pace.end(number + 0.2, [1, 1, 1, 1], np.full((1, 4), 0.5))
    assert pace.bounds(4) is None and pace._load(4).by_head.rounds == 0
