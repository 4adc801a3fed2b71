from dataclasses import replace

import numpy as np
import pytest

from specheads import UserError
from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.replay.cost import LEAST_ROUNDS, RoundTimes, _line, _medians, fit_costs

# seconds
STEP = 0.002
PASS = 0.01
MORE = 0.001
OVERHEAD = 0.0005
KINDS = {
    "fixed": True,
    "more fixed": True,
    "head": False,
}  # two that compute nothing, and one that does
# seconds that it adds to a step and to a round
HEAD = 0.0003
LEARNING = 0.0007


def verification(drafted):
    return PASS + MORE * drafted


def rounds(noise=0.0, slow=0.0, verify=verification, num_rounds=1200):
    """Rounds of three rules over 40 responses.

    A share `slow` of them is ten times as slow as it should be.
    """
    rng = np.random.default_rng(0)
    drafted = rng.integers(0, 9, num_rounds)
    rule = rng.integers(0, 3, num_rounds)
    has_head = rule == 2
    draft_seconds = (STEP + HEAD * has_head) * drafted + OVERHEAD * (drafted > 0)
    target_seconds = verify(drafted) + LEARNING * has_head
    busy = 1 + 9 * (rng.random(num_rounds) < slow)
    noisy = [
        seconds * busy * (1 + noise * rng.standard_normal(num_rounds))
        for seconds in (draft_seconds, target_seconds)
    ]
    # Responses differ in length, as they do: that is the variance which costs have to explain.
    response = rng.choice(40, num_rounds, p=np.arange(1, 41) / np.arange(1, 41).sum())
    return RoundTimes(drafted, drafted, *noisy, rule, response)


def test_exact_times_give_exact_costs():
    fit, _ = fit_costs(rounds(), KINDS)
    costs = fit.costs
    fitted = (
        costs.draft_seconds,
        costs.target_seconds,
        costs.verified_seconds,
        costs.round_seconds,
    )
    assert fitted == pytest.approx((STEP, PASS, MORE, OVERHEAD))
    assert costs.verification == pytest.approx([PASS + MORE * n for n in range(9)])
    assert costs.ratio == pytest.approx(5) and fit.num_rounds == 1200
    assert fit.rules["fixed"] == fit.rules["more fixed"] == RuleCosts()
    assert (fit.rules["head"].step_seconds, fit.rules["head"].round_seconds) == pytest.approx(
        (HEAD, LEARNING)
    )


def test_one_slow_round_in_ten_moves_no_cost():
    """Means would be off by a factor of 1.9."""
    times = rounds(slow=0.1)
    fit, _ = fit_costs(times, KINDS)
    costs = fit.costs
    assert costs.draft_seconds == pytest.approx(
        STEP, rel=0.01
    ) and costs.target_seconds == pytest.approx(PASS, rel=0.01)
    assert costs.verified_seconds == pytest.approx(MORE, rel=0.05)
    assert fit.rules["head"].step_seconds == pytest.approx(HEAD, rel=0.05)
    assert times.target_seconds.mean() > 1.5 * verification(times.drafted).mean()


def test_noise_moves_costs_little():
    fit, _ = fit_costs(rounds(noise=0.3, num_rounds=10_000), KINDS)
    assert fit.rules["fixed"] == fit.rules["more fixed"] == RuleCosts()
    assert fit.costs.draft_seconds == pytest.approx(STEP, rel=0.05)
    assert fit.costs.target_seconds == pytest.approx(PASS, rel=0.05)


def test_each_half_of_the_responses_is_predicted_from_the_other():
    times = rounds(noise=0.1)
    of_even, of_odd = fit_costs(times, KINDS)[1]
    even = times.response % 2 == 0
    assert of_even.num_rounds == (~even).sum() and of_odd.num_rounds == even.sum()
    changed = replace(times, draft_seconds=np.where(even, 100.0, times.draft_seconds))
    even_again, odd_again = fit_costs(changed, KINDS)[1]
    assert even_again == of_even and odd_again != of_odd
    assert fit_costs(times.part(times.response < 2), KINDS)[1] is None


def test_verification_in_steps_is_a_table():
    """A target that pads what it verifies to 4 or 8 tokens costs the same for all lengths
    between.
    """

    def padded(drafted):
        return PASS * np.where(drafted <= 4, 1.0, 1.6)

    fit, _ = fit_costs(rounds(verify=padded), KINDS)
    assert fit.costs.verification == pytest.approx([PASS] * 5 + [1.6 * PASS] * 4)
    counts = np.zeros((1, 9))
    counts[0, [3, 8]] = 2, 1
    expected = 14 * STEP + 3 * OVERHEAD + (2 * 1.0 + 1.6) * PASS
    assert fit.costs.seconds(np.array([14.0]), counts) == pytest.approx([expected])


def test_verifying_more_never_costs_less():
    costs = fit_costs(rounds(verify=lambda drafted: PASS - 0.0005 * drafted), KINDS)[0].costs
    assert costs.verified_seconds == 0 and len(set(costs.verification)) == 1
    assert 0.006 < costs.target_seconds < 0.01


def test_drafts_without_a_model_cost_no_step():
    times = rounds()
    times = RoundTimes(
        times.drafted * 0,
        times.drafted,
        times.drafted * 0 + 0.0001,
        *list(vars(times).values())[3:],
    )
    costs = fit_costs(times, KINDS)[0].costs
    assert (costs.draft_seconds, costs.round_seconds) == pytest.approx(
        (0, 0.0001)
    ) and costs.ratio == float("inf")


def exact(drafted, rule=0, response=0, head=HEAD, learning=LEARNING):
    """Rounds with these numbers of drafted tokens, by rules and in responses with these numbers.

    The third rule has a head.
    """
    drafted, rule, response = np.broadcast_arrays(np.array(drafted), rule, response)
    draft_seconds = (STEP + head * (rule == 2)) * drafted + OVERHEAD * (drafted > 0)
    return RoundTimes(
        drafted,
        drafted,
        draft_seconds,
        verification(drafted) + learning * (rule == 2),
        rule,
        response,
    )


@pytest.mark.parametrize("drafted", [[4, 4, 4, 4], [0, 0, 0], [1, 2]])
def test_rounds_that_cannot_separate_the_costs_are_refused(drafted):
    with pytest.raises(
        UserError, match="^these runs cannot separate .* at least two draft lengths.$"
    ):
        fit_costs(exact(drafted), KINDS)


def test_three_rounds_of_two_lengths_separate_the_costs():
    costs = fit_costs(exact([1, 3, 3]), KINDS)[0].costs
    assert (costs.draft_seconds, costs.verified_seconds, costs.round_seconds) == pytest.approx(
        (STEP, MORE, OVERHEAD)
    )


@pytest.mark.parametrize(
    ("drafted", "response", "halved"),
    [
        ([1, 2, 1, 2, 1, 2, 1, 2], [0, 0, 1, 1, 2, 2, 3, 3], True),
        ([1, 2, 1, 2, 1, 2, 1, 2], [0, 0, 1, 1, 2, 2, 1, 1], False),  # three responses
        ([1, 2, 1, 1, 1, 2, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3], False),  # one length in the odd ones
        ([1, 1, 1, 2, 1, 1, 1, 2], [0, 0, 1, 1, 2, 2, 3, 3], False),  # one length in the even ones
    ],
)
def test_halves_have_two_responses_and_two_lengths_each(drafted, response, halved):
    assert (fit_costs(exact(drafted, response=response), KINDS)[1] is not None) == halved


def test_a_round_without_a_draft_that_never_came_is_on_the_line_or_as_fast_as_the_fastest():
    assert fit_costs(exact([2, 3, 4] * 5), KINDS)[0].costs.verification == pytest.approx(
        [PASS + MORE * n for n in range(5)]
    )
    times = exact([1, 2, 3, 4, 5])
    first_is_fast = replace(times, target_seconds=np.where(times.drafted == 1, PASS / 2, PASS))
    assert fit_costs(first_is_fast, KINDS)[0].costs.verification == pytest.approx(
        [PASS / 2] * 2 + [PASS] * 4
    )


@pytest.mark.parametrize("rare", [LEAST_ROUNDS - 1, LEAST_ROUNDS])
def test_medians_of_few_rounds_count_only_without_two_others(rare):
    counts = {0: 9, 2: 8, 3: rare}
    number = np.repeat(list(counts), list(counts.values()))
    numbers, medians, weight = _medians(number, number + np.resize([0.0, 0.25, 0.0], len(number)))
    assert (
        numbers.tolist()
        == ([0, 2] if rare < LEAST_ROUNDS else [0, 2, 3])
        == [round(each) for each in medians]
    )
    assert weight.tolist() == [counts[each] for each in numbers]
    some = (
        number > 0 if rare < LEAST_ROUNDS else number > 2
    )  # one number that has enough rounds, or one number
    assert _medians(number[some], number[some] + 0.0)[0].tolist() == (
        [2, 3] if rare < LEAST_ROUNDS else [3]
    )


@pytest.mark.parametrize(
    ("x", "y", "weight", "line"),
    [
        ([0, 1, 3], [1, 3, 7], [1, 1, 1], (2, 1)),
        ([4], [8], [1], (0, 8)),
        ([1, 2], [5, 5], [1, 1], (0, 5)),
        ([1, 2], [5, 4], [1, 1], (0, 4)),  # never falls
        ([1, 2], [0.5, 1], [1, 1], (0.5, 0)),
        (
            [0, 1, 2],
            [0, 0, 6],
            [1, 1, 3],
            (3, 0),
        ),  # an intercept below 0: through the origin instead
        ([0, 1, 2], [0, 0, 0.6], [1, 1, 3], (0.3, 0)),
        ([0, 1, 2], [0, 0, 6], [1, 9, 1], (0, 0)),
        ([1, 2, 4], [0, 8, 20], [1, 1, 1], (5, 0)),
        ([0, 1, 2, 10], [0, 1, 2, 90], [1, 1, 1, 1], (9, 0)),  # far pairs count more
        ([0, 1, 2, 3], [0, 1, 4, 9], [9, 9, 1, 1], (1, 0)),  # pairs of many rounds count more
    ],
)
def test_the_line_is_that_of_the_weighted_median_slope(x, y, weight, line):
    assert _line(np.array(x), np.array(y, float), np.array(weight)) == pytest.approx(line)


def test_what_a_rule_adds_to_a_step_is_what_was_timed_by_itself_or_the_median_of_its_rounds():
    drafted = np.array([0, 1, 1, 3] * 12)
    rule = np.repeat([0, 2], 24)
    fit, _ = fit_costs(exact(drafted, rule), KINDS)
    assert vars(fit.rules["head"]) == pytest.approx(
        {"step_seconds": HEAD, "round_seconds": LEARNING}
    )
    fit, _ = fit_costs(exact(drafted, rule), KINDS, {"head": 0.5})
    assert vars(fit.rules["head"]) == pytest.approx(
        {"step_seconds": fit.costs.draft_seconds / 2, "round_seconds": LEARNING}
    )
    fit, _ = fit_costs(exact(drafted, 0), KINDS, {"head": 0.5})
    assert fit.rules["head"] == RuleCosts()  # it made no round
    fit, _ = fit_costs(exact(np.where(rule == 2, 1, drafted), rule), KINDS)
    assert fit.rules["head"].step_seconds >= HEAD  # one token each time
    fit, _ = fit_costs(exact(np.where(rule == 2, 0, drafted), rule), KINDS)
    assert vars(fit.rules["head"]) == pytest.approx(
        {"step_seconds": 0, "round_seconds": LEARNING}
    )  # it drafted nothing


def test_one_fixed_length_is_compared_with_other_rules():
    """Where the only rule without a cost drafted one length, the rounds of all rules separate the
    costs of draft and target.
    """
    times = rounds()
    some = times.part((times.rule == 2) | (times.drafted == 4))
    costs = fit_costs(some, KINDS)[0].costs
    assert STEP <= costs.draft_seconds <= STEP + HEAD and costs.verified_seconds == pytest.approx(
        MORE, rel=0.1
    )


def test_no_rule_makes_a_step_faster():
    """A machine that was busy with the fixed lengths only would say so."""
    times = rounds()
    faster = np.where(times.rule == 2, 0.5, 1.0)
    times = replace(
        times,
        draft_seconds=times.draft_seconds * faster,
        target_seconds=times.target_seconds * faster,
    )
    assert fit_costs(times, KINDS)[0].rules["head"] == RuleCosts(0.0, 0.0)


def test_seconds_of_counts():
    # two prompts: 20 rounds of 6 drafted tokens; one round of none and two of 3
    rounds = np.zeros((2, 7))
    rounds[0, 6] = 20
    rounds[1, 0] = 1
    rounds[1, 3] = 2
    seconds = StepCosts(STEP, PASS, MORE, OVERHEAD).seconds(np.array([120.0, 6.0]), rounds)
    assert seconds == pytest.approx(
        [
            120 * STEP + 20 * (PASS + 6 * MORE + OVERHEAD),
            6 * STEP + 3 * (PASS + OVERHEAD) + 6 * MORE,
        ]
    )


def test_beyond_a_table_each_token_costs_more():
    costs = StepCosts(STEP, PASS, MORE, verification=(PASS, 2 * PASS))
    assert costs.verify_seconds(np.arange(4)) == pytest.approx(
        [PASS, 2 * PASS, 2 * PASS + MORE, 2 * PASS + 2 * MORE]
    )


def test_at_a_ratio_throughput_is_a_speedup_over_the_target_alone():
    # one drafted token per round, always accepted: two tokens for 1 + 1/10 forward passes of the
    # target
    one_round = np.array([[0.0, 1.0]])
    assert 2 / StepCosts.at_ratio(10).seconds(np.ones(1), one_round) == pytest.approx([2 / 1.1])
    assert 2 / StepCosts(0.1, 1.0, 0.05).seconds(np.ones(1), one_round) == pytest.approx([2 / 1.15])


def test_a_rule_pays_for_its_steps_and_its_rounds():
    costs = StepCosts(STEP, PASS, MORE, OVERHEAD).with_rule(RuleCosts(HEAD, LEARNING))
    one_round = np.array([[0.0, 0.0, 1.0]])
    expected = 2 * (STEP + HEAD) + PASS + 2 * MORE + OVERHEAD + LEARNING
    assert costs.seconds(np.array([2.0]), one_round) == pytest.approx([expected])


def test_two_lengths_of_rules_that_compute_nothing_are_enough_for_what_all_have_in_common():
    drafted = np.array([1, 3, 5, 7] * 6)
    rule = np.array([0, 1, 2, 2] * 6)
    costs = fit_costs(exact(drafted, rule), KINDS)[0].costs
    assert (costs.draft_seconds, costs.round_seconds, costs.verified_seconds) == pytest.approx(
        (STEP, OVERHEAD, MORE)
    )
