import pytest

from specheads import UserError
from specheads.decoding.records import DecodeStats
from specheads.replay.cost import Costs, fit_costs, throughput


def stats(num_draft, num_target, seconds, prefill=0.0, tokens=10):
    return DecodeStats(tokens, num_draft, 0, 0, num_target, num_draft, seconds + prefill, prefill)


def test_exact_times_give_exact_costs():
    parts = [stats(d, t, 0.002 * d + 0.01 * t, prefill=0.5) for d, t in [(0, 30), (20, 10), (50, 5), (14, 9)]]
    costs = fit_costs(parts)
    assert costs.draft_seconds == pytest.approx(0.002)
    assert costs.target_seconds == pytest.approx(0.01)
    assert costs.ratio == pytest.approx(5)
    assert costs.r_squared == pytest.approx(1)


def test_noise_lowers_r_squared():
    parts = [stats(d, t, 0.002 * d + 0.01 * t + n) for d, t, n in [(0, 30, 0.05), (20, 10, -0.04), (50, 5, 0.06), (14, 9, -0.05)]]
    assert fit_costs(parts).r_squared < 0.95


def test_counts_in_fixed_proportion_are_refused():
    with pytest.raises(UserError, match="at least two draft lengths"):
        fit_costs([stats(2 * t, t, 0.1 * t) for t in (1, 2, 3)])


def test_throughput_is_tokens_over_the_models_time():
    # 100 tokens in 20 rounds of 6 drafted tokens: 80 accepted, 40 discarded
    seconds = 120 * 0.002 + 20 * 0.01
    assert throughput(120 / 100, 20 / 100, Costs(0.002, 0.01)) == pytest.approx(100 / seconds)


def test_at_a_ratio_throughput_is_a_speedup_over_the_target_alone():
    # one draft token per round, always accepted: two tokens for 1 + 1/10 target forwards
    assert throughput(1 / 2, 1 / 2, Costs.at_ratio(10)) == pytest.approx(2 / 1.1)
