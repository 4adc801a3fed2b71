"""Rows of what was decoded, from counts and seconds given by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from specheads import stopping
from specheads.decoding.records import DecodeStats
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.verification import BlockVerification
from specheads.evaluation.candidates import TARGET_ALONE, Candidate, CostTable, fixed_length
from specheads.evaluation.replayed_sets import Outcome
from specheads.evaluation.report import MEASURED
from specheads.evaluation.rows import live_rows, replayed_speeds
from specheads.evaluation.sweep import Measured
from specheads.papers import BiasedVerification
from specheads.replay.intervals import Interval
from specheads.replay.replay import Counts

RULE = stopping.MaxProbability(0.5, 4)
LOGISTIC = Candidate("logistic", "logistic", RULE, RULE, rule_name="logistic")
HEAD = Candidate(
    "head family", "head", RULE, RULE, rule_name="head_threshold", head="mine", automatic=True
)
TOKENS = (10, 30)
SHORT = fixed_length(2)
LONG = fixed_length(3)


def decoded(setting, seconds, expected=None, calls=(5, 5)):
    """Two prompts, whose reading took a second each.

    3 tokens accepted of the first, 9 of the second.
    """
    expected = (None, None) if expected is None else expected
    parts = [
        DecodeStats(tokens, 8, accepted, 8 - accepted, number, 8, each + 1.0, 1.0, num)
        for tokens, accepted, each, number, num in zip(
            TOKENS, (3, 9), seconds, calls, expected, strict=True
        )
    ]
    return Measured(setting, parts, [[[2, 0, 0, 0.1, 0.3]], [[1, 0, 0, 0.1, 0.5]]])


MEASURED_ROWS = [
    decoded(TARGET_ALONE, (8, 12)),
    decoded(SHORT, (4, 6)),
    decoded(LONG, (2, 3)),
    decoded(LOGISTIC, (5, 3), expected=(6, 10)),
    decoded(HEAD, (1, 3), expected=(0, 0)),
]
DEV = {"target alone": 2.0, SHORT.name: 5.0, LONG.name: 4.0, "logistic": 6.0, "head": 7.0}
TRIED = {name: np.array([speed, 99.0]) for name, speed in DEV.items()}


def rows_of(measured=MEASURED_ROWS, lossless=True, groups=("a", "b"), **values):
    rows = live_rows(Outcome([], None, measured=measured, **values), lossless, groups)
    return {row.name: row for row in rows}


def test_speeds_are_over_all_prompts_without_their_reading():
    rows = rows_of(tried=TRIED)
    assert list(rows) == ["target alone", SHORT.name, LONG.name, "logistic", "head"]
    alone, short, logistic, head = (
        rows[name] for name in ("target alone", SHORT.name, "logistic", "head")
    )
    assert (
        alone.tokens_per_second.value,
        short.tokens_per_second.value,
        head.tokens_per_second.value,
    ) == (2.0, 4.0, 10.0)
    assert short.speedup == Interval(
        2.0, 2.0, 2.0
    )  # twice as fast on either prompt: resampled alike, no interval
    assert logistic.speedup.value == 2.5 and head.speedup.value == 5.0
    assert head.verification_rate.value == 0.25 and head.discard_rate.value == 4 / 40
    assert head.milliseconds == pytest.approx(
        {"p50": 200, "p90": 520, "p99": 592}
    )  # of 200, 200 and 600
    assert (head.family, head.rule_name, head.head, head.automatic) == (
        "head family",
        "head_threshold",
        "mine",
        True,
    )


def test_gains_are_over_what_was_the_fastest_on_dev_prompts():
    """Here the longer drafts are the faster ones, but nobody could know."""
    rows = rows_of(tried=TRIED)
    assert [row.dev_speedup for row in rows.values()] == [1.0, 2.5, 2.0, 3.0, 3.5]
    assert rows["head"].gain.value == 10 / 4 and rows[LONG.name].gain == Interval(2.0, 2.0, 2.0)
    assert rows["head"].over_headless.value == 10 / 5  # the logistic
    assert {name for name, row in rows.items() if row.over_headless is None} == set(rows) - {"head"}
    untried = rows_of()
    assert (
        untried["head"].dev_speedup is None
        and untried["head"].gain.value == untried["head"].over_headless.value == 10 / 8
    )
    assert rows_of([MEASURED_ROWS[0], MEASURED_ROWS[-1]])["head"].gain is None


def test_accepted_tokens_are_over_those_that_the_rule_expected():
    rows = rows_of()
    assert rows["logistic"].accepted_over_expected.value == 12 / 16
    low = rows["logistic"].accepted_over_expected.low
    high = rows["logistic"].accepted_over_expected.high
    assert (low, high) == (12 / 16, 12 / 16)  # a prompt in each half
    assert (
        rows["head"].accepted_over_expected is None
        and rows[SHORT.name].accepted_over_expected is None
    )
    few = decoded(LOGISTIC, (5, 3), expected=(0.25, 0.25))
    assert rows_of([MEASURED_ROWS[0], few])["logistic"].accepted_over_expected.value == 24
    part = decoded(LOGISTIC, (5, 3), expected=(6, None))
    assert rows_of([MEASURED_ROWS[0], part])["logistic"].accepted_over_expected is None
    four = decoded(
        LOGISTIC, (5, 3), expected=(0.0, 4.0)
    )  # resamples may hold prompts alone of which nothing was expected
    stats = [part for part in four.stats for _ in range(2)]
    alone = [part for part in MEASURED_ROWS[0].stats for _ in range(2)]
    double = [
        replace(each, stats=parts) for each, parts in ((MEASURED_ROWS[0], alone), (four, stats))
    ]
    assert np.isfinite(rows_of(double, groups="abcd")["logistic"].accepted_over_expected.high)


@pytest.mark.parametrize("lossless", [True, False])
def test_what_changes_the_distribution_is_marked(lossless):
    others = (None, BlockVerification(), BiasedVerification(0.5))
    settings = [
        replace(SHORT, name=str(number), verification=other) for number, other in enumerate(others)
    ]
    rows = rows_of(
        [MEASURED_ROWS[0], *(decoded(setting, (4, 6)) for setting in settings)], lossless
    )
    assert [row.lossless for row in rows.values()] == [True, lossless, True, False]
    assert [row.verification for row in rows.values()] == [None, None, "block", others[2].name]


def test_speeds_by_replay_are_of_the_decoded_prompts_at_costs_of_other_prompts():
    """Of three replayed prompts two were decoded, the first at the costs of one half and the second
    at those of the other.
    """
    counts = Counts(
        np.array([20.0, 40, 999]),
        np.array([4.0, 6, 99]),
        np.zeros(3),
        np.array([[2.0, 4], [1, 6], [9, 9]]),
    )
    halves = [
        CostTable({MEASURED: StepCosts(draft, target)})
        for draft, target in ((1.0, 2.0), (10.0, 20.0))
    ]
    table = CostTable({MEASURED: StepCosts(5.0, 5.0)}, halves=halves)
    under_block = replace(SHORT, name="under block", verification=BlockVerification())
    measured = [*MEASURED_ROWS[:2], decoded(under_block, (4, 6))]
    sets = [None, SimpleNamespace(recording=SimpleNamespace(num_prompts=3))]
    known = {SHORT.name: counts, "under block": counts}
    outcome = Outcome([], table, sets, measured=measured, decoded_counts=known)
    expected = pytest.approx({SHORT.name: 60 / ((4 + 12) + (60 + 140))})
    assert replayed_speeds(outcome) == expected
    rows = {row.name: row for row in live_rows(outcome, True, ["a", "b"])}
    assert {
        name: row.replayed_tokens_per_second
        for name, row in rows.items()
        if row.replayed_tokens_per_second
    } == expected
    two, one = (SimpleNamespace(recording=SimpleNamespace(num_prompts=count)) for count in (2, 1))
    assert replayed_speeds(replace(outcome, sets=[None, two])) == expected
    assert (
        replayed_speeds(replace(outcome, sets=[None, one]))
        == replayed_speeds(replace(outcome, sets=[]))
        == {}
    )
