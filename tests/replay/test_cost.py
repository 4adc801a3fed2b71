import numpy as np
import pytest

from specheads import UserError
from specheads.replay.cost import Costs, RoundTimes, fit_costs, own_costs


def rounds(noise=0.0, growth=0.001, num_rounds=400):
    """Rounds at 2 ms a draft forward, 10 ms a target forward and `growth` more per drafted token."""
    rng = np.random.default_rng(0)
    drafted = rng.integers(0, 9, num_rounds)
    draft_seconds = 0.002 * drafted * (1 + noise * rng.standard_normal(num_rounds))
    target_seconds = (0.01 + growth * drafted) * (1 + noise * rng.standard_normal(num_rounds))
    return RoundTimes(drafted, drafted, draft_seconds, target_seconds, rng.integers(0, 20, num_rounds))


def test_exact_times_give_exact_costs():
    costs = fit_costs(rounds())
    assert (costs.draft_seconds, costs.target_seconds, costs.verified_seconds) == pytest.approx((0.002, 0.01, 0.001))
    assert costs.ratio == pytest.approx(5) and costs.r_squared == pytest.approx(1) and costs.num_rounds == 400


def test_noise_lowers_r_squared_and_moves_costs_little():
    costs = fit_costs(rounds(noise=0.3))
    assert 0.5 < costs.round_r_squared < 0.95 and costs.r_squared > costs.round_r_squared
    assert costs.draft_seconds == pytest.approx(0.002, rel=0.05) and costs.target_seconds == pytest.approx(0.01, rel=0.05)


def test_verifying_more_never_costs_less():
    """Where noise says so the growth is nought, and the target's forward the mean of what was measured."""
    found = rounds(growth=-0.0005)
    costs = fit_costs(found)
    assert costs.verified_seconds == 0 and costs.target_seconds == pytest.approx(found.target_seconds.mean())


def test_a_fit_foretells_the_total_time():
    found = rounds(noise=0.3)
    total = fit_costs(found).seconds(found.draft_calls.sum(), len(found.drafted), found.drafted.sum())
    assert total == pytest.approx(found.draft_seconds.sum() + found.target_seconds.sum(), rel=0.01)


@pytest.mark.parametrize("drafted", [[4, 4, 4, 4], [0, 0, 0], [1, 2]])
def test_rounds_that_tell_nothing_apart_are_refused(drafted):
    drafted = np.array(drafted)
    with pytest.raises(UserError, match="at least two draft lengths"):
        fit_costs(RoundTimes(drafted, drafted, drafted * 0.1, drafted * 0.1 + 1, drafted * 0))


def test_seconds_of_counts():
    # 100 tokens in 20 rounds of 6 drafted tokens
    assert Costs(0.002, 0.01, 0.001).seconds(120, 20, 120) == pytest.approx(120 * 0.002 + 20 * 0.01 + 120 * 0.001)


def test_at_a_ratio_throughput_is_a_speedup_over_the_target_alone():
    # one draft token per round, always accepted: two tokens for 1 + 1/10 target forwards
    assert 2 / Costs.at_ratio(10).seconds(1, 1, 1) == pytest.approx(2 / 1.1)


def test_a_rules_own_costs_foretell_its_own_time():
    drafted = np.array([4, 4, 4, 2])
    times = RoundTimes(drafted, drafted, drafted * 0.003, 0.012 + 0.001 * drafted, drafted * 0)
    own = own_costs(Costs(0.002, 0.01, 0.001), times)
    assert (own.draft_seconds, own.target_seconds, own.verified_seconds) == pytest.approx((0.003, 0.012, 0.001))
