"""Arrivals."""

import numpy as np
import pytest
from random_recording import random_recording

from specheads import UserError
from specheads.evaluation.serving.traffic import closed_loop, poisson

RECORDING = random_recording(num_prompts=7)


def test_every_prompt_is_asked_about_equally_often():
    counts = np.bincount(closed_loop(RECORDING, 4, 24, seed=0).prompts, minlength=7)
    assert counts.min() >= 3 and counts.max() <= 4


def test_only_the_first_requests_of_a_closed_loop_are_under_way():
    traffic = closed_loop(RECORDING, 5, 30, seed=3)
    lengths = RECORDING.lengths.numpy()[traffic.prompts]
    assert traffic.arrivals is None and (traffic.starts < lengths).all()
    assert (traffic.starts[5:] == 0).all() and (traffic.starts[:5] > 0).sum() >= 3


def test_arrivals_have_their_rate():
    """False alarm below 1e-6: 4,000 groups, five standard errors of their mean distance are 8 %."""
    for burst in (1, 4):
        arrivals = poisson(RECORDING, 20.0, 4000 * burst, 8, seed=0, burst=burst).arrivals
        assert (np.diff(arrivals) >= 0).all()
        assert len(np.unique(arrivals)) == 4000
        assert len(arrivals) / arrivals[-1] == pytest.approx(20.0, rel=0.08)


def test_bad_loads_are_refused():
    with pytest.raises(UserError, match="must be more than the concurrency"):
        closed_loop(RECORDING, 4, 4, seed=0)
    with pytest.raises(UserError, match="must be positive"):
        poisson(RECORDING, 0.0, 4, 4, seed=0)
