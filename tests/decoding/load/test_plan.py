"""Plans of a round: against all depths and numbers of tokens, tried one by one."""

from dataclasses import replace

import numpy as np
import pytest

from specheads import UserError
from specheads.decoding.load.costs import LoadCosts, SecondsTable
from specheads.decoding.load.plan import Planner, SurvivalSample
from specheads.decoding.load.roofline import roofline

DECAYING = SurvivalSample(np.array([[0.9, 0.7, 0.6], [0.6, 0.5, 0.2], [0.4, 0.1, 0.05], [0.8, 0.75, 0.7]]))


def test_gains_are_those_of_the_tokens_with_the_most_survival():
    assert DECAYING.gain(1, 4).tolist() == pytest.approx([0, 0.9, 1.7, 2.3, 2.7])
    assert DECAYING.gain(2, 4)[:5].tolist() == pytest.approx([0, 0.9, 1.7, 2.45, 3.15])
    assert DECAYING.gain(3, 8)[-1] == pytest.approx(2 * DECAYING.survival.sum())
    assert DECAYING.gain(0, 4).tolist() == [0.0]


def test_a_token_after_a_worse_one_is_not_taken_before_it():
    rising = SurvivalSample(np.array([[0.3, 0.9], [0.5, 0.2]]))
    assert rising.gain(2, 2).tolist() == pytest.approx([0, 0.5, 0.8, 1.1, 1.3])  # 0.9 counts as the 0.3 that it needs


@pytest.mark.parametrize("requests", [1, 3, 4, 10, 40])
def test_the_throughput_is_the_best_of_all_depths_and_numbers_of_tokens(requests):
    costs = LoadCosts(SecondsTable((1, 2), (0.2, 0.2)), SecondsTable((1, 16, 17), (2.0, 2.0, 2.1)))
    best = max(
        (requests + gained) / (0.2 * depth + costs.target(requests + number))
        for depth in range(4)
        for number, gained in enumerate(DECAYING.gain(depth, requests))
    )
    assert Planner(costs, DECAYING, 3).throughput(requests) == pytest.approx(best)


def test_plans_get_shallower_with_the_load_and_with_prompts_and_end():
    planner = Planner(roofline("h200", "8B", "1B"), DECAYING, 3)
    depths = [planner.plan(requests, 0).depth for requests in (1, 32, 64, 256, 1024)]
    assert depths == sorted(depths, reverse=True) and depths[0] == 3 and depths[-1] == 0
    with_prompts = [planner.plan(64, tokens).depth for tokens in (0, 40, 200)]
    assert with_prompts == sorted(with_prompts, reverse=True) and with_prompts[0] > with_prompts[-1] == 0
    assert planner.plan(4, 0).adaptive and not planner.plan(64, 0).adaptive
    assert planner.plan(64, 0).worth > 0 == planner.plan(1024, 0).worth


@pytest.mark.parametrize("survival", [np.zeros((0, 3)), np.array([0.5]), np.array([[1.5]]), np.array([[np.nan]])])
def test_bad_samples_are_refused(survival):
    with pytest.raises(UserError, match="must be probabilities"):
        SurvivalSample(survival)


def test_tokens_are_weighed_where_that_saves_more_than_it_takes():
    steep = LoadCosts(SecondsTable((1, 2), (0.1, 0.1)), SecondsTable((1, 2), (1.0, 1.3)))
    slow, slower = (replace(steep, admission=SecondsTable((1, 2), (seconds, seconds))) for seconds in (0.01, 1.0))
    planners = [Planner(costs, DECAYING, 3) for costs in (steep, slow, slower)]
    assert [planner.ever_weighs() for planner in planners] == [True, True, False]
    plans = [planner.plan(4, 0) for planner in planners]
    assert [plan.admits for plan in plans] == [True, True, False]
    assert plans[0].throughput > plans[1].throughput > plans[2].throughput
    fixed = max(
        (4 + DECAYING.gain(depth, 4)[-1]) / (0.1 * depth + steep.envelope(4 + 4 * depth) if depth else steep.target(4))
        for depth in range(4)
    )
    assert plans[2].throughput == pytest.approx(fixed)  # everything that is drafted is submitted
