"""Costs from data sheets."""

import numpy as np
import pytest

from specheads import UserError
from specheads.decoding.load.roofline import ACCELERATORS, MODELS, roofline


def test_an_8b_target_on_an_h200_is_flat_up_to_about_130_tokens():
    target = roofline("h200", "8B", "1B").target
    assert target(1) == target(120) == pytest.approx(4.5e-3, rel=0.02)
    assert 125 < target.flat_until < 140
    assert target.last_slope == pytest.approx(0.034e-3, rel=0.02)
    assert target(1000) == pytest.approx(1000 * target.last_slope)  # computing takes all the time


@pytest.mark.parametrize("accelerator", ACCELERATORS)
@pytest.mark.parametrize("target", MODELS)
def test_the_roofline_is_the_larger_of_reading_and_computing(accelerator, target):
    table = roofline(accelerator, target, "0.25B").target
    sizes = np.arange(1, 2000)
    expected = np.maximum(table(1), table.last_slope * sizes)
    assert table(sizes) == pytest.approx(expected, rel=1e-2)
    assert table.envelope()(sizes) == pytest.approx(table(sizes))  # it is convex


@pytest.mark.parametrize(
    ("names", "mistake"),
    [
        (("b9000", "8B", "1B"), "accelerator=b9000"),
        (("h200", "9B", "1B"), "target_size=9B"),
        (("h200", "8B", "2B"), "draft_size=2B"),
    ],
)
def test_unknown_names_are_refused_by_their_keys(names, mistake):
    with pytest.raises(UserError, match=f"^{mistake} is not known; expected one of"):
        roofline(*names)
