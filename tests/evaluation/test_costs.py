"""What rules cost, and what follows for their speed: by hand, and on decoded rounds."""

from dataclasses import replace

import numpy as np
import pytest

from specheads import stopping
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import StepTimes, TimedSteps
from specheads.evaluation.candidates import (
    FIXED,
    ORACLE_BOUND,
    TARGET_ALONE,
    Candidate,
    CostTable,
    RuleChoice,
    fixed_length,
)
from specheads.evaluation.costs import Overheads, cost_table, overheads_of
from specheads.evaluation.keys import MEASURED
from specheads.evaluation.sweep import DecodedRound, Measured
from specheads.replay.replay import Counts

COUNTED = CostTable({"10": StepCosts.at_ratio(10)}, {"small": 0.1, "middle": 0.2, "large": 0.5})
RULES = {
    FIXED: RuleChoice(stopping.FixedLength, {"num_tokens": 2}),
    "head_threshold": RuleChoice(stopping.HeadThreshold, {"threshold": 0.5}),
}
TIMES = StepTimes(
    StepCosts(1.0, 4.0, 0.5),
    {
        "HeadThreshold of small": 0.25,
        "HeadThreshold of large": 1.25,
        "Confidence": 0.125,
    },
)
TABLE = cost_table(COUNTED, TimedSteps(TIMES), Overheads(5.0, 1.0), RULES)
PLAIN = fixed_length(2)
CONFIDENT = Candidate("confidence", "confidence", *[stopping.Confidence(0.5)] * 2)


def with_head(head):
    # In place of a head, as costs go by the class of the rule and the name of the head
    rule = stopping.FixedLength(2)
    rule.__class__ = stopping.HeadThreshold
    return Candidate("head", f"head {head}", rule, rule, head=head)


def counts(tokens, drafted, rounds, whole=(0, 0)):
    accepted = np.zeros(len(tokens))
    return Counts(np.array(tokens), np.array(drafted), accepted, np.array(rounds), np.array(whole))


# Two prompts: 6 tokens of 2 rounds with 2 drafted tokens each, and 20 tokens of 3 rounds with 0, 1
# and 2.
SOME = counts([6, 20], [4, 3], [[0, 0, 2], [1, 1, 1]])


def test_a_rule_pays_at_a_ratio_for_its_head_and_here_for_what_was_timed():
    assert list(TABLE.costs) == [MEASURED, "10"]
    assert TABLE.of(PLAIN, "10") == StepCosts.at_ratio(10)
    assert TABLE.of(with_head("small"), "10").draft_seconds == pytest.approx(0.11)
    here = StepCosts(1.0, 4.0, 0.5, round_seconds=5.0, alone_overhead=1.0)
    assert TABLE.of(PLAIN, MEASURED) == TABLE.of(ORACLE_BOUND, MEASURED) == here
    assert TABLE.of(CONFIDENT, MEASURED) == replace(here, draft_seconds=1.125)
    assert TABLE.head_share(with_head("large"), MEASURED) == pytest.approx(1.25)
    assert TABLE.head_share(PLAIN, MEASURED) is None


def test_heads_that_were_not_timed_lie_between_those_that_were_by_their_size():
    middle = TABLE.of(with_head("middle"), MEASURED).draft_seconds
    assert middle == pytest.approx(1 + 0.25 + (0.2 - 0.1) / (0.5 - 0.1) * 1.0)


def test_a_speed_up_is_a_ratio_of_sums_over_the_target_alone():
    resamples = np.array([[1, 1], [2, 0]])
    at_ten = TABLE.speedup(SOME, resamples, PLAIN, "10")
    assert at_ten.tolist() == pytest.approx([26 / (0.7 + 5), 12 / (0.8 + 4)])
    # Seconds: a round takes 9, and 0.5 for each drafted token; a token of the target alone takes 5.
    first = 4 + 2 * 10
    second = 3 + 9 + 9.5 + 10
    here = TABLE.speedup(SOME, resamples, PLAIN, MEASURED)
    assert here.tolist() == pytest.approx([26 * 5 / (first + second), 12 * 5 / (2 * first)])
    head = with_head("large")
    free = TABLE.speedup(SOME, resamples, head, MEASURED, free_head=True)
    assert free.tolist() == here.tolist()
    assert (TABLE.speedup(SOME, resamples, head, MEASURED) < here).all()


def test_timed_steps_are_resampled_along_with_prompts():
    """The first row is the estimate; after it, each row of prompts meets one row of costs."""
    slower = replace(TIMES, costs=replace(TIMES.costs, draft_seconds=3.0))
    timed = TimedSteps(TIMES, [slower, TIMES])
    table = cost_table(COUNTED, timed, Overheads(5.0, 1.0), RULES)
    same = np.ones((4, 2))
    speeds = table.speedup(SOME, same, PLAIN, MEASURED)
    one, *others = speeds.tolist()
    assert one == TABLE.speedup(SOME, same[:1], PLAIN, MEASURED).item()
    assert others == pytest.approx([one * (55.5 / (55.5 + 14)), one, one * (55.5 / (55.5 + 14))])
    assert timed.ratios().tolist() == pytest.approx([4, 4 / 3, 4])


def test_rounds_after_drafts_that_were_accepted_whole_may_take_longer():
    table = cost_table(COUNTED, TimedSteps(TIMES), Overheads(5.0, 1.0, 2.0), RULES)
    some = counts([6, 20], [4, 3], [[0, 0, 2], [1, 1, 1]], whole=(1, 2))
    once = np.ones((1, 2))
    before = 26 * 5 / table.speedup(SOME, once, PLAIN, MEASURED).item()
    assert 26 * 5 / table.speedup(some, once, PLAIN, MEASURED).item() == pytest.approx(before + 6)
    assert table.of(PLAIN, MEASURED).seconds(
        some.drafted, some.rounds, some.whole
    ).sum() == pytest.approx(before + 6)


def test_overheads_are_what_decoded_rounds_take_besides_their_steps():
    costs = StepCosts(1.0, 4.0, 0.5, round_seconds=9.0)
    alone = Measured(TARGET_ALONE, rounds=[[DecodedRound(1, 0, 0, 0.0, 4.5)] * 20])
    rounds = [
        DecodedRound(2, 2, 2, 2.25, 5.0),
        DecodedRound(1, 4, 4, 4.5, 6.0),
        DecodedRound(1, 2, 2, 3.25, 5.0),
    ]
    drafting = Measured(PLAIN, rounds=[rounds * 10])
    assert overheads_of(alone, drafting, costs) == Overheads(0.5, 0.5)
    whole = [DecodedRound(3, 2, 2, 2.25, 5.0), DecodedRound(1, 2, 2, 3.0, 5.0)]
    drafting = Measured(PLAIN, rounds=[whole * 10, whole[:1]])
    assert overheads_of(alone, drafting, costs) == Overheads(0.25, 0.5, 0.75)
    fast = Measured(PLAIN, rounds=[[DecodedRound(2, 2, 2, 0.1, 0.1)]])
    assert overheads_of(fast, fast, costs) == Overheads(0.0, 0.0)
    faster = [DecodedRound(3, 2, 2, 1.25, 5.0), DecodedRound(1, 2, 2, 2.0, 5.0)]
    drafting = Measured(PLAIN, rounds=[faster * 10, faster[:1]])
    assert overheads_of(alone, drafting, costs) == Overheads(0.0, 0.5, 0.75)
