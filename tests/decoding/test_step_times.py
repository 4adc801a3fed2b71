"""Steps by themselves: what is timed is what decoding runs, and what a rule adds is its own
share.
"""

import numpy as np
import pytest
from simulated_evaluations import BUSY, Machine

from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp
from specheads.decoding.step_times import (
    ENOUGH,
    FEWEST,
    FIRST,
    IN_A_ROW,
    NUM_RESAMPLES,
    PLAIN,
    TARGET,
    VERIFIED,
    TimedSteps,
    repeated,
    step_costs,
    time_steps,
)
from specheads.decoding.stopping import HeadThreshold

STEP = 0.001
PASS = 0.008


def seconds_of(head_share=0.2, first=STEP, verified=0.0):
    """The seconds of each step without noise."""
    seconds = {PLAIN: IN_A_ROW * STEP, FIRST: first, TARGET: PASS}
    seconds["head"] = IN_A_ROW * STEP * (1 + head_share)
    for count in VERIFIED:
        seconds[f"{count} verified"] = PASS + verified * count
    return seconds


def timed_on(machine, quiet, is_enough=lambda taken: False, patience=5.0, repeats=None):
    steps = {name: lambda each=each: machine.run(each) for name, each in quiet.items()}
    return repeated(steps[TARGET], steps, lambda: machine.now, repeats, patience, is_enough)


def test_every_step_of_a_decoder_has_its_seconds(nano):
    config = HeadConfig(nano.draft_lm.hidden_size, width=8, vocab_size=nano.vocab_size)
    rule = HeadThreshold(AcceptanceHead(config).eval().requires_grad_(False), 1.0)
    decoder = SpeculativeDecoder(nano, warp=Warp(0.0), engine="eager")
    before = decoder.generate([1, 2, 3], 8).tokens.tolist()
    done = []
    taken = time_steps(
        decoder, {"head": rule}, context=32, repeats=3, verified=(2, 4), advance=done.append
    )
    assert len(done) == 3 and min(done) > 0
    assert {len(each) for each in taken.values()} == {3}
    times = TimedSteps.of(taken, ["head"]).estimate
    assert times.costs.draft_seconds > 0 and times.costs.target_seconds > 0
    assert len(times.costs.verification) == 5
    assert set(times.costs.spread) == {PLAIN, FIRST, TARGET, "2 verified", "4 verified"}
    assert times.share("head") == times.rules["head"] / times.costs.draft_seconds >= 0
    assert decoder.generate([1, 2, 3], 8).tokens.tolist() == before


def test_other_processes_do_not_change_what_steps_are_found_to_take():
    """Bursts, waits and a drifting speed, of a machine whose truth is known."""
    machine = Machine(np.random.default_rng(0), BUSY)
    timed = TimedSteps.of(timed_on(machine, seconds_of(verified=0.0001), patience=20), ["head"])
    costs = timed.estimate.costs
    assert costs.ratio == pytest.approx(PASS / STEP, rel=0.02)
    assert timed.estimate.share("head") == pytest.approx(0.2, abs=0.02)
    assert costs.verify_seconds(8) / costs.target_seconds == pytest.approx(1.1, rel=0.02)
    ratios = timed.ratios()
    low, high = np.quantile(ratios, (0.025, 0.975))
    assert len(ratios) == 1 + NUM_RESAMPLES and low < PASS / STEP < high < 1.1 * low


def test_steps_are_timed_until_that_is_enough_or_patience_is_over():
    """It looks whenever the seconds have doubled, and never after fewer repeats than tell
    something.
    """
    machine = Machine(np.random.default_rng(0), BUSY)
    seen = []

    def third_look(taken):
        seen.append(len(taken[TARGET]))
        return len(seen) == 3

    taken = timed_on(machine, seconds_of(), third_look, patience=1e9)
    assert seen[0] == ENOUGH and seen[2] == len(taken[TARGET])
    slow = timed_on(machine, seconds_of(), patience=0.0)
    assert {len(each) for each in slow.values()} == {FEWEST}
    assert {len(each) for each in timed_on(machine, seconds_of(), repeats=7).values()} == {7}


def test_costs_are_narrow_once_chance_hardly_changes_draft_steps():
    machine = Machine(np.random.default_rng(0), BUSY)
    few = timed_on(machine, seconds_of(), repeats=20)
    many = timed_on(machine, seconds_of(), patience=60)
    assert not TimedSteps.of(few, ["head"]).is_narrow
    assert TimedSteps.of(many, ["head"]).is_narrow


def exact(**changes):
    """The estimate of steps without noise."""
    taken = {name: [each] * 8 for name, each in seconds_of(**changes).items()}
    return TimedSteps.of(taken, ["head"]).estimate


def test_what_a_first_step_takes_more_is_an_overhead_of_its_round():
    times = exact(first=0.0022)
    later = (IN_A_ROW * STEP - 0.0022) / (IN_A_ROW - 1)
    assert times.costs.draft_seconds == pytest.approx(later)
    assert times.costs.round_seconds == pytest.approx(0.0022 - later)
    assert times.rules["head"] == pytest.approx(0.2 * STEP)
    assert exact(first=0.0009).costs.round_seconds == 0  # by noise
    assert exact(head_share=-0.1).rules["head"] == 0  # no rule makes a step faster


def test_verifications_between_those_timed_are_on_a_line():
    costs = step_costs(0.1, {0: 1.0, 2: 1.2, 4: 1.3, 8: 1.7}, {})
    assert costs.verification == pytest.approx((1.0, 1.1, 1.2, 1.25, 1.3, 1.4, 1.5, 1.6, 1.7))
    assert costs.verify_seconds(10) == pytest.approx(1.9)
