"""What ways to decode are predicted to be worth, and the answer that follows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_recording import random_recording

from specheads.decoding.step_times import LONGEST, TARGET, StepTimes, TimedSteps, step_costs
from specheads.decoding.stopping import FixedLength
from specheads.evaluation.candidates import CostTable, fixed_length
from specheads.evaluation.costs import Overheads, cost_table
from specheads.evaluation.probe.prediction import (
    BETTER,
    FIXED_NAME,
    HEAD_SHARES,
    LOGISTIC,
    PLAIN,
    LiveCheck,
    Option,
    _head_option,
    better_draft,
    doubts_of,
    head_name,
    predict,
    recommended,
)
from specheads.evaluation.replayed_sets import RecordedSet, counts_of
from specheads.replay.intervals import Interval
from specheads.replay.recording import GROUND_TRUTH
from specheads.replay.replay import replay

QUIET = {TARGET: 1.0}
RULES = {"Logistic": 0.0}
HEADS = {8: 0.0, 64: 0.05}
NO_OVERHEADS = Overheads()
TIMES = StepTimes(step_costs(0.1, dict.fromkeys((0, 2, 4, 8, LONGEST), 1.0), QUIET), RULES)


def predicted(halves, times=TIMES, heads=HEADS, greedy=False, overheads=NO_OVERHEADS):
    table = cost_table(CostTable({}), TimedSteps(times), overheads, {})
    return predict(halves, table, heads, greedy)


def half(seed, acceptance=0.7):
    recording = random_recording(
        20, num_samples=2, max_tokens=20, acceptance=acceptance, seed=seed, longest=20
    )
    recording.features[GROUND_TRUTH] = torch.where(
        torch.rand(len(recording.tokens), generator=torch.Generator().manual_seed(seed)) < 0.5,
        0.5,
        0.9,
    )
    return RecordedSet(
        "half", "dev", recording, groups=[f"{seed} {number}" for number in range(20)]
    )


@pytest.fixture(scope="module")
def halves():
    return [half(0), half(1)]


@pytest.fixture
def options(halves):
    return {option.name: option for option in predicted(halves)}


def test_a_fixed_length_is_chosen_on_one_half_and_counted_on_the_other(halves, options):
    lengths = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
    counts = [
        dict(
            zip(lengths, counts_of(each.recording, [fixed_length(k) for k in lengths]), strict=True)
        )
        for each in halves
    ]

    def seconds(each):
        return each.target_calls.sum() + 0.1 * each.drafted.sum()

    best = [max(lengths, key=lambda k, of=of: of[k].tokens.sum() / seconds(of[k])) for of in counts]
    reported = counts[0][best[1]], counts[1][best[0]]
    expected = sum(each.tokens.sum() for each in reported) / sum(map(seconds, reported))
    assert options[FIXED_NAME].speedup.value == pytest.approx(expected)
    assert options[FIXED_NAME].value == " or ".join(
        dict.fromkeys(f"fixed_length(num_tokens={k})" for k in (best[1], best[0]))
    )
    assert options[FIXED_NAME].speedup.low < expected < options[FIXED_NAME].speedup.high


def test_a_better_draft_is_accepted_more_often_by_a_share():
    recording = half(0, 0.6).recording
    before, after = (
        each.accepted.double().mean().item() for each in (recording, better_draft(recording, 0.1))
    )
    assert after / before == pytest.approx(1.1, abs=0.04)  # three standard errors
    assert (
        better_draft(half(0, 0.99).recording, 0.1).accepted.all()
        and better_draft(half(0, 1.0).recording, 0.1).accepted.all()
    )


def test_drafts_that_are_recorded_whole_become_better_as_others_do():
    recording = half(0, 0.6).recording
    drafts = recording.drafts()
    shape = recording.accepted.shape
    whole = replace(
        recording,
        branch_accepted=drafts.num_accepted.minimum(drafts.most).reshape(shape),
        branch_length=drafts.most.reshape(shape),
    )
    rules = [FixedLength(length) for length in (1, 3, 8)]
    for first, second in (
        (recording, whole),
        (better_draft(recording, 9), better_draft(whole, 9)),  # all are accepted
    ):
        for expected, found in zip(replay(first, rules), replay(second, rules), strict=True):
            assert found.accepted.tolist() == expected.accepted.tolist()
    before, after = (
        each.labels().accepted.double().mean().item() for each in (whole, better_draft(whole, 0.1))
    )
    assert 1.03 < after / before < 1.17


def test_a_logistic_pays_for_its_steps(halves, options):
    costly = replace(TIMES, rules={"Logistic": 0.04})
    made = {option.name: option.speedup.value for option in predicted(halves, costly)}
    assert (
        made[LOGISTIC] < options[LOGISTIC].speedup.value
        and made[FIXED_NAME] == options[FIXED_NAME].speedup.value
    )


def test_bounds_are_above_what_can_be_decoded(options):
    speeds = {name: option.speedup.value for name, option in options.items()}
    assert (
        options["ceiling"].is_bound and options["oracle"].is_bound and not options[BETTER].is_bound
    )
    assert (
        speeds["oracle"] > speeds["ceiling"]
        and speeds[BETTER] > speeds[FIXED_NAME]
        and speeds[PLAIN] == 1
    )


def test_gains_are_over_the_fixed_length_on_the_same_prompts(options):
    fixed = options[FIXED_NAME]
    assert (fixed.gain.low, fixed.gain.value, fixed.gain.high) == (1, 1, 1)
    for option in options.values():
        assert option.gain.value == pytest.approx(option.speedup.value / fixed.speedup.value)
    ceiling = options["ceiling"]
    width = (ceiling.speedup.high - ceiling.speedup.low) / fixed.speedup.value
    # Prompts that are easy for one are easy for the other
    assert ceiling.gain.high - ceiling.gain.low < width


def test_a_head_closes_a_part_of_the_gap_and_pays_for_its_steps(options):
    fixed, ceiling = (options[name].speedup.value for name in (FIXED_NAME, "ceiling"))
    free, slow = (options[head_name(width)].speedup for width in (8, 64))
    assert free.value == pytest.approx(fixed + HEAD_SHARES[False][1] * (ceiling - fixed))
    assert slow.value < free.value and free.low < free.value < free.high


def test_a_rule_is_chosen_and_fitted_without_the_prompts_that_it_is_counted_on():
    """Of "A or B", B is chosen on the first half, whatever the second one is, and A on the
    second.
    """
    first, *others = half(0, 0.9), half(1, 0.3), half(2, 0.6)
    chosen = [
        {each.name: each.value.split(" or ") for each in predicted([first, other])}
        for other in others
    ]
    for name in (FIXED_NAME, LOGISTIC, BETTER):
        (one, same), (another, again) = (each[name] for each in chosen)
        assert same == again and len({one, another, same}) == 3
    swapped = {each.name: each.value.split(" or ") for each in predicted([others[0], first])}
    assert all(swapped[name] == chosen[0][name][::-1] for name in (FIXED_NAME, LOGISTIC, BETTER))
    assert not any(each["oracle"][0] for each in chosen)  # there is nothing to choose


def test_seconds_may_have_any_unit(halves):
    def times(unit):
        rules = {name: 0.02 * unit for name in RULES}
        return StepTimes(
            step_costs(0.1 * unit, {0: unit, 8: 1.2 * unit, LONGEST: 1.5 * unit}, QUIET), rules
        )

    seconds, milli = (
        predicted(halves, times(unit), {8: 0.02 * unit}, True, Overheads(0.1 * unit, 0.4 * unit))
        for unit in (1.0, 1000.0)
    )
    for one, other in zip(seconds, milli, strict=True):
        assert one.name == other.name and one.speedup.value == pytest.approx(other.speedup.value)
        assert [one.gain.low, one.speedup.high] == pytest.approx(
            [other.gain.low, other.speedup.high]
        )


def test_prompts_of_a_group_are_resampled_together(halves):
    """With one group in each half every resample is the sample, so that nothing varies but what
    heads may close.
    """
    alike = [replace(each, groups=[name] * 20) for name, each in zip("ab", halves, strict=True)]
    for option in predicted(alike):
        if option.width is None:
            assert (
                option.speedup.low
                == pytest.approx(option.speedup.value)
                == pytest.approx(option.speedup.high)
            )
        else:
            assert option.speedup.low < option.speedup.value < option.speedup.high


def test_the_target_alone_is_the_unit(options):
    plain = options[PLAIN]
    fixed = options[FIXED_NAME]
    assert plain.speedup == Interval(1.0, 1.0, 1.0) and plain.gain.value == pytest.approx(
        1 / fixed.speedup.value
    )
    assert plain.gain.low == pytest.approx(
        1 / fixed.speedup.high
    ) and plain.gain.high == pytest.approx(1 / fixed.speedup.low)


def test_a_heads_interval_has_the_least_and_the_most_that_heads_closed():
    """Of the way from 2 to 3 times the speed a third, a half or all.

    Its steps take 0.1 of the target's time for a token.
    """
    fixed = np.full(5, 2.0)
    ceiling = np.full(5, 3.0)
    free = _head_option(8, fixed, ceiling, 0.0, (0.25, 0.5, 1.0))
    assert (
        free.width == 8 and free.name == head_name(8) and free.speedup == Interval(2.5, 2.25, 3.0)
    )
    assert free.gain == Interval(1.25, 1.125, 1.5)
    slow = _head_option(64, fixed, ceiling, 0.1, (0.5, 0.5, 0.5))
    assert slow.speedup.value == slow.speedup.low == pytest.approx(
        1 / (1 / 2.5 + 0.1)
    ) and slow.gain.value == pytest.approx(1.0)
    # A ceiling that is the slower one
    reversed_ = _head_option(8, ceiling, fixed, 0.0, (0.25, 0.5, 1.0))
    assert (
        reversed_.speedup == Interval(2.5, 2.0, 2.75)
        and reversed_.gain.low < reversed_.gain.value < reversed_.gain.high
    )
    noisy = _head_option(
        8, np.array([2.0, 1.0, 3.0]), np.array([3.0, 2.0, 4.0]), 0.0, (0.0, 0.5, 1.0)
    )
    assert noisy.speedup.low < 1.1 and noisy.speedup.high > 3.9  # the sample itself is no resample
    assert noisy.speedup.value == 2.5 and noisy.gain.value == 1.25


def test_a_heads_steps_cost_as_often_as_the_ceilings(halves):
    """Its rule drafts as many tokens for each emitted token."""
    options = predicted(halves, heads={8: 0.0, 16: 0.05, 32: 0.1}, greedy=True)
    made = {option.name: option.speedup.value for option in options}
    free, some, twice = (1 / made[head_name(width)] for width in (8, 16, 32))
    gap = made["ceiling"] - made[FIXED_NAME]
    assert 1 / free == pytest.approx(made[FIXED_NAME] + HEAD_SHARES[True][1] * gap)
    assert twice - free == pytest.approx(2 * (some - free)) and 1 < (some - free) / 0.05 < 20


def test_overheads_of_rounds_slow_down_drafts_and_those_of_tokens_the_target_alone(halves, options):
    slower = {
        o.name: o.speedup.value for o in predicted(halves, overheads=Overheads(round_seconds=0.2))
    }
    faster = {
        o.name: o.speedup.value for o in predicted(halves, overheads=Overheads(alone_seconds=0.5))
    }
    assert slower[FIXED_NAME] < options[FIXED_NAME].speedup.value
    assert faster[FIXED_NAME] == pytest.approx(1.5 * options[FIXED_NAME].speedup.value)


def known(**speeds):
    names = {
        "plain": PLAIN,
        "fixed": FIXED_NAME,
        "logistic": LOGISTIC,
        "better": BETTER,
        "head": head_name(20),
    }
    speeds = {"plain": 1.0, "logistic": 0.0, "better": 0.0, "head": 0.0} | speeds
    fixed = speeds["fixed"]
    return [
        Option(
            names[name],
            Interval(value, value - 0.05, value + 0.05),
            Interval(value / fixed, value / fixed - 0.01, value / fixed + 0.01),
            "fixed_length(num_tokens=3)",
            width=20 if name == "head" else None,
        )
        for name, value in speeds.items()
    ]


@pytest.mark.parametrize(
    ("speeds", "choice", "command"),
    [
        ({"fixed": 0.9}, PLAIN, "specheads probe model.draft=<another draft>"),
        ({"fixed": 1.5, "logistic": 1.5}, FIXED_NAME, "specheads evaluate head=null"),
        (
            {"fixed": 1.5, "logistic": 1.65},
            LOGISTIC,
            "specheads evaluate head=null stopping=[fixed_length,logistic]",
        ),
        # What is predicted for rules is too much
        ({"fixed": 1.5, "logistic": 1.56}, FIXED_NAME, None),
        ({"fixed": 1.5, "logistic": 1.6, "head": 1.62}, LOGISTIC, None),
        (
            {"fixed": 1.5, "logistic": 1.6, "head": 1.7},
            head_name(20),
            "specheads train head.width=20",
        ),
        ({"fixed": 1.5, "head": 1.6, "better": 1.7}, head_name(20), "specheads distill"),
        ({"fixed": 0.8, "better": 0.9}, PLAIN, "specheads probe model.draft=<another draft>"),
    ],
)
def test_the_answer_is_the_simplest_that_nothing_beats(speeds, choice, command):
    answer = recommended(known(**speeds), lambda *words: " ".join(["specheads", *words]))
    assert answer.choice == choice and (command is None or answer.command == command)
    assert ("distil" in answer.text) == ("distill" in answer.command)


def said(options):
    return recommended(options, lambda *words: " ".join(words)).text


def test_of_several_heads_the_fastest_is_meant_and_none_is_needed():
    *without, head = sorted(
        known(fixed=1.5, logistic=1.65, head=1.8), key=lambda option: option.width or 0
    )
    slow, fast = (
        replace(head, width=width, speedup=Interval(speed, 1, 2))
        for width, speed in ((8, 1.7), (64, 1.9))
    )
    for heads in ([slow, fast, head], [fast, slow], [head, slow, fast]):
        told = said([*without, *heads]).replace("\u00a0", " ")
        assert told.startswith("Train a head (64 wide): 1.90× [1.00, 2.00]")
    assert recommended(without, lambda *words: "").choice == LOGISTIC


@pytest.mark.parametrize(
    ("speeds", "choice", "distil"),
    [
        ({"fixed": 1.01}, PLAIN, False),  # what is just noticeable is not more than noticeable
        ({"fixed": 1.0, "better": 1.05}, PLAIN, False),
        ({"fixed": 1.0, "better": 1.06}, PLAIN, True),
        # Better than with this draft, and no better than without one
        ({"fixed": 0.9, "better": 0.99}, PLAIN, False),
        ({"fixed": 0.9, "better": 1.0}, PLAIN, False),
        ({"fixed": 1.5, "better": 1.52}, FIXED_NAME, False),
    ],
)
def test_what_is_just_worth_its_trouble_is_not_worth_it(speeds, choice, distil):
    answer = recommended(known(**speeds), lambda *words: " ".join(words))
    assert answer.choice == choice and ("distil it first" in answer.text) == distil == (
        answer.command == "distill"
    )


@pytest.mark.parametrize(
    ("predicted", "decoded", "count"), [(1.6, 1.5, 0), (1.5, 1.6, 0), (1.25, 1.0, 1), (0.8, 1.0, 1)]
)
def test_predictions_that_contradict_decoding_are_doubted(predicted, decoded, count):
    assert len([*doubts_of(LiveCheck(4, 3, 100.0, 100.0 * decoded, predicted))]) == count
