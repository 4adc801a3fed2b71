"""The best of several methods of an experiment, compared without favour to the larger family."""

import numpy as np
import pytest

from benchmarks.papers.measures import cross_fitted_gain


def test_a_setting_that_suits_one_half_of_the_files_gains_nothing_on_the_other():
    """Two settings are fast on one file each. By prompt each half has both files.

    By file the choice fails on the other half.
    """
    files = ["a", "a", "b", "b"] * 5
    seconds = np.ones(len(files))
    suits = np.array(
        [[[40.0 if file == name else 10.0 for file in files], seconds] for name in ("a", "b")]
    )
    plain = np.array([[20 * seconds, seconds]])
    by_prompt, by_file = (
        cross_fitted_gain(suits, plain, what).value for what in (range(len(files)), files)
    )
    assert by_prompt == pytest.approx(25 / 20) and by_file == pytest.approx(10 / 20)


def test_the_best_on_each_half_is_compared_on_the_other_and_both_count():
    """Four prompts, halves 0, 2 and 1, 3. Ours: b is best on the first half, a on the second.

    Theirs has one setting.
    """
    a = [[10, 10, 10, 10], [4, 1, 4, 1]]
    b = [[10, 10, 10, 10], [2, 5, 2, 5]]
    ours = np.array([a, b], dtype=float)
    theirs = np.array([[[10] * 4, [3] * 4]], dtype=float)
    # b on prompts 1 and 3 takes 10 seconds, a on 0 and 2 takes 8; theirs takes 12.
    assert cross_fitted_gain(ours, theirs, range(4)).value == pytest.approx(12 / 18)
    assert cross_fitted_gain(theirs, ours, range(4)).value == pytest.approx(18 / 12)


def test_choosing_among_many_equal_rules_gains_nothing():
    """Forty thresholds that differ by noise alone: their in-sample best looks 5 % better, the
    cross-fitted one does not.
    """
    rng = np.random.default_rng(0)

    def noisy(count):
        return np.stack(
            [10.0 + rng.integers(0, 21, size=(count, 40)), np.full((count, 40), 12.0)], axis=1
        )

    families = [noisy(40) for _ in range(10)]
    gains = [cross_fitted_gain(family, noisy(1), range(40)).value - 1 for family in families]
    assert abs(np.mean(gains)) < 0.05  # five standard errors
    assert families[0][:, 0].sum(axis=-1).max() / (40 * 20) > 1.05
