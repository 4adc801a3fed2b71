"""What an evaluation concludes about simulated prompts is right as often as its intervals say."""

import pytest
from simulated_evaluations import (
    BUSY,
    CASES,
    CROWDED,
    QUIET,
    Population,
    Simulation,
    concluded,
    tally_of,
)


@pytest.fixture(scope="module")
def some():
    return Population(250, heads=8, error=1.0, headless=False)


def few(of, gain, num_final=100):
    return Simulation(of, gain, num_prompts=(60, num_final))


def test_of_many_heads_that_gain_nothing_none_is_used(some):
    """About one in a hundred is; more than 4 of 60 have probability 1e-4 (binomial).

    By hindsight it would be 10.
    """
    tally = concluded(few(some, 0.0), 60)
    assert tally.heads <= 4 and tally.false_wins <= 4


@pytest.mark.parametrize("noise", [QUIET, BUSY])
def test_a_head_that_gains_is_found_whatever_else_runs(some, noise):
    """A gain of 5 % is hardly ever missed; fewer than 7 of 10 have probability 1e-3 if 5 % are."""
    tally = concluded(few(some, 0.05), 10, noise)
    assert tally.found >= 7 and not tally.false_wins and tally.covered >= 7


def test_the_clock_of_a_crowded_machine_makes_no_winner(some):
    """About 2 % of these say to use a head; more than 2 of 10 have probability 1e-3."""
    tally = concluded(few(some, 0.0), 10, CROWDED)
    assert tally.heads <= 2 and tally.false_wins <= 2


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_conclusions_are_right_as_often_as_intervals_say(case):
    """Of 200 evaluations at most 5 % name a gain that there is not.

    More than 6.5 % have probability 1e-2 if 3 % do.

    Where there is no gain, no more than 5 % use a head, and a gain of 5 % or more is found in 95 %.
    The setting to use is slower than the best without a head by more than half its interval in 10 %
    at most; more have probability 1e-2 if 5 % are. 95 % intervals cover in 90 %; fewer have
    probability 1e-3 if 95 % do.
    """
    tally = tally_of(CASES[case], 200)
    print(f"{case}: {tally}")
    assert tally.share("false_wins") <= 0.05 and tally.share("worse") <= 0.1
    assert tally.share("covered") >= 0.9
    if case.startswith("no gain"):
        assert tally.share("heads") <= 0.05
    elif "2 %" not in case:
        assert tally.share("found") >= 0.95
