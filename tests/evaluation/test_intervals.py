import numpy as np
import pytest
import torch

from specheads.decoding.records import DecodeStats
from specheads.evaluation.intervals import auroc_samples, gain_over_fixed, interval, mean_samples, resample_counts, sums
from specheads.evaluation.sweep import Measured, Setting
from specheads.heads.metrics import auroc
from specheads.replay.cost import Costs


def measured(family, value, rounds_of):
    """A setting whose prompt i has `rounds_of(i) = (rounds, drafted, accepted)`."""
    parts, rounds = [], []
    for i in range(40):
        number, drafted, accepted = rounds_of(i)
        parts.append(DecodeStats(number + accepted, drafted, accepted, drafted - accepted, number, drafted, 1.0, 0.0))
        lengths = [drafted // number + (place < drafted % number) for place in range(number)]
        rounds.append([[0, length, length, 0.0, 0.0] for length in lengths])
    return Measured(Setting(f"{family} {value}", family, value, None), parts, rounds)


def at_ten(setting):
    return Costs.at_ratio(10)


def test_resamples_keep_the_number_of_prompts_of_both_halves():
    counts = resample_counts(11)
    assert (counts[0] == 1).all()
    assert (counts[:, ::2].sum(1) == 6).all() and (counts[:, 1::2].sum(1) == 5).all()
    assert len(np.unique(counts[1:], axis=0)) > 100


def test_the_interval_of_a_mean_has_the_textbook_width():
    values = np.random.default_rng(0).normal(10, 2, size=400)
    counts = resample_counts(400)
    found = interval(counts @ values / 400)
    half = 1.96 * values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.15 * half)


def test_rates_are_ratios_of_sums():
    found = sums(measured("fixed_length", 2, lambda i: (10 + i, 20 + i, 10)).stats, resample_counts(40))
    tokens = sum(20 + i for i in range(40))
    assert found.verification_rate[0] == pytest.approx(sum(10 + i for i in range(40)) / tokens)
    assert found.discard_rate[0] == pytest.approx(sum(10 + i for i in range(40)) / tokens)


def test_the_gain_of_a_better_rule_is_its_true_ratio():
    fixed = measured("fixed_length", 2, lambda i: (10, 20, 10))
    head = measured("head_threshold", 0.5, lambda i: (10, 15, 10))
    gain = gain_over_fixed([fixed, head], at_ten)
    assert gain.value == gain.low == gain.high == pytest.approx((20 / 10 + 10) / (15 / 10 + 10))


def test_each_rule_pays_its_own_costs():
    fixed = measured("fixed_length", 2, lambda i: (10, 20, 10))
    head = measured("head_threshold", 0.5, lambda i: (10, 15, 10))
    gain = gain_over_fixed([fixed, head], lambda setting: Costs(0.1 if setting.family == "fixed_length" else 0.12, 1.0))
    assert gain.value == pytest.approx((20 * 0.1 + 10) / (15 * 0.12 + 10))


def test_choosing_among_many_equal_rules_gains_nothing():
    """Forty thresholds that differ by noise alone: their in-sample best looks 10 % better, the cross-fitted one does not."""
    rng = np.random.default_rng(0)

    def noisy(family, value):
        accepted = rng.integers(0, 21, size=40)
        return measured(family, value, lambda i: (10, 20, int(accepted[i])))

    gains = []
    for _ in range(10):
        family = [noisy("head_threshold", v) for v in range(40)]
        gains.append(gain_over_fixed([noisy("fixed_length", 0), *family], at_ten).value - 1)
    assert abs(np.mean(gains)) < 0.05  # five standard errors
    best = max(sum(p.num_tokens for p in m.stats) for m in family) / (40 * 20)
    assert best > 1.05


def test_without_a_head_there_is_no_gain_to_report():
    assert gain_over_fixed([measured("fixed_length", 2, lambda i: (10, 20, 10))], at_ten) is None


@pytest.mark.parametrize("levels", [3, 10**6])
def test_metrics_of_resampled_prompts_are_those_of_their_tokens(levels):
    """A resample repeats a prompt's tokens as often as it has the prompt; ties count half, bins cost little."""
    rng = np.random.default_rng(0)
    prompt = np.repeat(np.arange(12), rng.integers(150, 350, size=12))
    scores = np.round(rng.normal(size=len(prompt)) * levels) / levels
    accepted = rng.random(len(prompt)) < 1 / (1 + np.exp(-scores))
    counts = resample_counts(12)[:4].astype(int)
    found, means = auroc_samples(scores, accepted, prompt, counts), mean_samples(scores, prompt, counts)
    for row, area, mean in zip(counts, found, means, strict=True):
        tokens = np.repeat(np.arange(len(prompt)), row[prompt])
        expected = auroc(torch.tensor(scores[tokens]), torch.tensor(accepted[tokens]))
        assert area == pytest.approx(expected, abs=1e-3) and mean == pytest.approx(scores[tokens].mean())
