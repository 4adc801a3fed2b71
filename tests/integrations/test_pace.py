"""What is learned from rounds, in a simulation where times and chances are known, and the rules that follow from it."""

import numpy as np
import pytest

from specheads.integrations.pace import EXPLORED, KNOTS, KNOWN, Pace

LONGEST = 8


class World:
    """Rounds whose times are known. Tokens are accepted at rates that a head predicts, or overrates by `confidence`."""

    def __init__(self, base=10.0, verified=0.1, first=1.0, step=1.0, confidence=1.0, easy=0.95, hard=0.35, noise=0.0):
        self.base, self.verified, self.first, self.further = base, verified, first, step
        self.confidence, self.rates, self.noise = confidence, (easy, hard), noise
        self.rng, self.now, self.pace = np.random.default_rng(0), 0.0, Pace()
        self.tokens, self.steps, self.drafted = 0, 0, 0

    def round(self, num_requests, bounds_of, drafts=True):
        """Do one round; `bounds_of` returns when drafts end, or None: all have LONGEST tokens."""
        rates = self.rng.choice(self.rates, size=num_requests)
        rejects = self.rng.random((LONGEST, num_requests)) > rates
        accepted_most = np.where(rejects.any(0), rejects.argmax(0), LONGEST)
        survival, going, lengths, survivals = np.ones(num_requests), np.ones(num_requests, bool), np.zeros(num_requests, int), []
        bounds = bounds_of() if drafts else None
        for step in range(LONGEST if drafts else 0):
            self.now += self.first if step == 0 else self.further
            self.pace.step(self.now, step == 0)
            lengths, survival = lengths + going, survival * rates ** (1 / self.confidence)
            survivals.append(survival)
            if bounds is not None:
                gains = np.interp(survival, np.linspace(0, 1, KNOTS), self.pace.gains())
                going = going & (gains >= bounds.alone)
                if not going.any() or gains[going].sum() < bounds.step + bounds.each * going.sum():
                    break
        self.pace.end(self.now, lengths, np.array(survivals).reshape(len(survivals), num_requests))
        read = num_requests + lengths.sum()
        self.now += (self.base + self.verified * read) * (1 + self.noise * self.rng.random())
        accepted = np.minimum(accepted_most, lengths)
        rejected = (lengths - accepted).tolist() if lengths.any() else None
        self.pace.begin(self.now, num_requests, int(read), rejected, True)
        self.tokens += num_requests + accepted.sum()
        self.steps, self.drafted = self.steps + len(survivals), self.drafted + lengths.sum()

    def rate_of(self, num_requests, count, **how):
        start, tokens = self.now, self.tokens
        for _ in range(count):
            self.round(num_requests, **how)
        return (self.tokens - tokens) / (self.now - start)

    def paced(self, num_requests):
        return lambda: self.pace.bounds(num_requests)


def best_fixed(num_requests, **world):
    """Return the rate of the best fixed length, none included, in expectation."""
    costs = World(**world)
    rates = np.array(costs.rates)[:, None]
    best = 0.0
    for length in range(LONGEST + 1):
        emitted = num_requests * (1 + (rates ** np.arange(1, length + 1)).sum(1).mean())
        drafting = costs.first + (length - 1) * costs.further if length else 0.0
        noise = 1 + costs.noise / 2
        best = max(best, emitted / (drafting + noise * (costs.base + costs.verified * num_requests * (1 + length))))
    return best


def test_times_are_learned():
    world = World(base=20.0, verified=0.3, step=1.5)
    world.rate_of(4, 400, bounds_of=world.paced(4))
    load = world.pace._load(4)
    assert load.steps / load.num_steps == pytest.approx(1.5) and load.others.slope() == pytest.approx(0.3, rel=0.2)


def test_a_heads_confidence_is_put_right():
    """Drafts by argmax of a head that learned from sampled ones: it believes in far too much."""
    world = World(confidence=3.0)
    world.rates = np.linspace(0.1, 0.99, 90)
    world.rate_of(8, 500, bounds_of=lambda: None)
    gains = world.pace.gains()
    # After k tokens of a request that accepts at rate r, the head's survival is r^(k/3), and the next token's chance r^(k+1).
    for survival in (0.5, 0.7, 0.9):
        low, high = survival**6, survival ** (3 * LONGEST / (LONGEST - 1))
        assert low - 0.05 < np.interp(survival, np.linspace(0, 1, KNOTS), gains) < high + 0.05
    assert (np.diff(gains) >= 0).all()


@pytest.mark.parametrize("num_requests", [1, 4, 16, 64])
@pytest.mark.parametrize("confidence", [1.0, 2.0])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_pace_is_at_least_that_of_the_best_fixed_length(num_requests, confidence, noise):
    world = World(confidence=confidence, noise=noise)
    world.rate_of(num_requests, 200, bounds_of=world.paced(num_requests))
    made = world.rate_of(num_requests, 3000 if num_requests < 16 else 800, bounds_of=world.paced(num_requests))
    assert made > 0.99 * best_fixed(num_requests, confidence=confidence, noise=noise)
    if num_requests == 1:
        assert made > 1.05 * best_fixed(1, confidence=confidence, noise=noise)


def test_lengths_follow_what_costs():
    def drafted(**costs):
        world = World(**costs)
        world.rate_of(4, 300, bounds_of=world.paced(4))
        world.drafted = world.steps = 0
        world.rate_of(4, 300, bounds_of=world.paced(4))
        return world.drafted, world.steps

    usual, dear_steps, dear_tokens = drafted(), drafted(step=6.0), drafted(verified=2.0)
    assert dear_steps[1] < usual[1] and dear_tokens[0] < usual[0]


def test_nothing_is_drafted_where_no_draft_pays():
    world = World(verified=5.0, base=1.0, easy=0.3, hard=0.1)
    for _ in range(KNOWN + 200):
        world.round(16, world.paced(16), world.pace.drafts(16))
    asked = [world.pace.drafts(16) for _ in range(4 * (EXPLORED + 1))]
    assert sum(asked) == 4  # tried now and then
    cheap = World()
    for _ in range(KNOWN + 50):
        assert cheap.pace.drafts(4)
        cheap.round(4, cheap.paced(4))


def test_other_numbers_of_requests_begin_with_what_is_known():
    world = World()
    assert world.pace.bounds(4) is None
    world.rate_of(4, 100, bounds_of=world.paced(4))
    known, guessed = world.pace.bounds(4), world.pace.bounds(8)
    assert guessed.step == pytest.approx(2 * known.step, rel=0.01)
    for _ in range(3):  # and go on with it until they have their own
        world.round(8, world.paced(8))
        assert world.pace.bounds(8) is not None


def test_rounds_in_which_requests_were_awaited_do_not_count():
    world = World()
    world.rate_of(4, 100, bounds_of=world.paced(4))
    before = world.pace.bounds(4)
    world.now += 1000.0
    world.round(4, world.paced(4))
    assert world.pace.bounds(4).step == pytest.approx(before.step, rel=0.05)


def test_rounds_with_new_requests_do_not_count():
    pace = Pace()
    for number in range(20):
        pace.begin(float(number), 4, 8, [1, 0, 0, 0], steady=False)
        pace.step(number + 0.1, True)
        pace.end(number + 0.2, [1, 1, 1, 1], np.full((1, 4), 0.5))
    assert pace.bounds(4) is None and pace._load(4).rounds == 0
