"""Steps by themselves: what is timed is what decoding runs, and what a rule adds is its own
share.
"""

import numpy as np
import pytest
from fakes import needs_compiler

from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp
from specheads.decoding import step_times as module
from specheads.decoding.engine import CompiledEngine
from specheads.decoding.step_times import FIRST, PLAIN, TARGET, VERIFIED, step_costs, step_times
from specheads.decoding.stopping import HeadThreshold, MaxProbability


def test_every_step_has_its_seconds_and_their_spread(nano):
    config = HeadConfig(nano.draft_lm.hidden_size, width=8, vocab_size=nano.vocab_size)
    head = AcceptanceHead(config).eval().requires_grad_(False)
    decoder = SpeculativeDecoder(nano, warp=Warp(0.0), engine="eager")
    times = step_times(
        decoder, {"head": HeadThreshold(head, 1.0)}, context=32, repeats=3, verified=(2, 4)
    )
    costs = times.costs
    assert costs.draft_seconds > 0 and costs.target_seconds > 0 and len(costs.verification) == 5
    assert set(costs.spread) == {PLAIN, FIRST, TARGET, "2 verified", "4 verified"}
    assert times.share("head") == times.rules["head"].step_seconds / costs.draft_seconds >= 0
    assert (
        decoder.generate([1, 2, 3], 8).tokens.tolist()
        == SpeculativeDecoder(nano, warp=Warp(0.0), engine="eager")
        .generate([1, 2, 3], 8)
        .tokens.tolist()
    )


@needs_compiler
def test_draft_steps_are_timed_as_drafting_runs_them(nano, monkeypatch):
    """Also those of a rule that would stop at once: what each adds is asked for, not where it
    stops.
    """
    decoder = SpeculativeDecoder(nano, warp=Warp(0.0), engine="compiled")
    counts = []
    repeat = CompiledEngine.repeat

    def counted(*arguments, **options):
        count, state = repeat(*arguments, **options)
        counts.append(count)
        return count, state

    monkeypatch.setattr(CompiledEngine, "repeat", counted)
    step_times(decoder, {"sure": MaxProbability(1.0)}, context=32, repeats=3, verified=())
    assert sorted(counts) == [1] * 3 + [module.IN_A_ROW] * 6


def test_a_head_adds_the_median_of_its_steps_over_those_without_one(monkeypatch):
    """One slow step in five, as on a busy machine, does not count."""
    now = iter(range(10**6))
    clock = [0.0]
    seconds = {"plain": 0.001, "head": 0.00117}
    monkeypatch.setattr(module, "now", lambda device: clock[0])

    def step(name):
        def run():
            clock[0] += seconds[name] * (9 if next(now) % 5 == 0 else 1)

        return run

    drafts = {name: step(name) for name in seconds}
    monkeypatch.setattr(module, "IN_A_ROW", 1)
    taken = module._timed(lambda: None, drafts, {}, 101, 1e9, None)
    median = {name: sorted(each)[50] for name, each in taken.items()}
    assert median["head"] / median["plain"] - 1 == pytest.approx(0.17)
    slow = module._timed(lambda: None, drafts, {}, 101, patience=0.0, device=None)
    assert {len(each) for each in slow.values()} == {module.FEWEST}


def test_steps_are_timed_until_that_is_enough(monkeypatch):
    """It looks whenever the seconds have doubled, and never after fewer repeats than tell
    something.
    """
    clock = [0.0]
    seen = []
    monkeypatch.setattr(module, "now", lambda device: clock[0])

    def step():
        clock[0] += 0.125

    def enough(taken):
        seen.append(len(taken["a"]))
        return len(seen) == 3

    taken = module._timed(lambda: None, {}, {"a": step}, 10**9, 60.0, None, enough)
    assert seen == [module.ENOUGH, 21, 33] and len(taken["a"]) == 33  # the last after four seconds


def test_what_a_first_step_takes_more_is_an_overhead_of_its_round():
    seconds = {PLAIN: 0.0013, FIRST: 0.0022, TARGET: 0.01, "head": 0.0014} | {
        f"{count} verified": 0.01 for count in VERIFIED
    }
    times = module._costs(seconds, {"head": 0.0001}, VERIFIED, {})
    assert times.costs.draft_seconds == pytest.approx(
        0.001
    ) and times.costs.round_seconds == pytest.approx(0.0012)
    assert times.share("head") == pytest.approx(0.1)
    seconds[FIRST] = 0.0009  # by noise
    assert module._costs(seconds, {}, VERIFIED, {}).costs.round_seconds == 0


def test_a_low_quantile_leaves_out_what_others_took():
    rng = np.random.default_rng(0)
    seconds = {PLAIN: 0.001, FIRST: 0.001, TARGET: 0.008, "head": 0.0012}
    seconds |= {f"{count} verified": 0.008 + 0.001 * count for count in VERIFIED}

    def ends(busy):
        slower = {
            name: 1 + 0.01 * rng.random(400) + 30 * rng.random(400) * (rng.random(400) < busy)
            for name in seconds
        }
        return module.ends_of(
            {name: each * slower[name] for name, each in seconds.items()}, ["head"]
        )

    for low, middle, high in (ends(0.0), ends(0.7)):
        assert middle.costs.ratio == pytest.approx(8, rel=0.02)
        assert (
            low.costs.draft_seconds
            < middle.costs.draft_seconds
            < high.costs.draft_seconds
            < 1.02 * low.costs.draft_seconds
        )
        assert middle.share("head") == pytest.approx(0.2, abs=0.02)
        assert middle.costs.verified_seconds == pytest.approx(0.001, rel=0.1)
        assert low.costs.target_seconds == middle.costs.target_seconds == high.costs.target_seconds
    low, middle, high = ends(0.97)  # a low quantile is disturbed itself
    assert high.costs.draft_seconds > 1.5 * low.costs.draft_seconds


def test_verifications_between_those_timed_are_on_a_line():
    costs = step_costs(0.1, {0: 1.0, 2: 1.2, 4: 1.3, 8: 1.7}, {})
    assert costs.verification == pytest.approx((1.0, 1.1, 1.2, 1.25, 1.3, 1.4, 1.5, 1.6, 1.7))
    assert costs.verify_seconds(10) == pytest.approx(1.9)
