import numpy as np
import pytest

from specheads.evaluation.candidates import TARGET_ALONE
from specheads.evaluation.sweep import Measured
from specheads.replay.intervals import milliseconds


def test_the_tokens_of_a_round_share_its_seconds_equally():
    measured = Measured(
        TARGET_ALONE, rounds=[[[3, 0, 0, 0.2, 0.4], [1, 0, 0, 0.1, 0.4]], [[2, 0, 0, 0.0, 0.2]]]
    )
    assert measured.token_seconds == pytest.approx([0.2, 0.2, 0.2, 0.5, 0.1, 0.1])


def test_percentiles_are_interpolated_between_the_values():
    """Of 0, 1, ..., 10 seconds the percentile p lies at p/10."""
    assert milliseconds(np.arange(11.0)) == pytest.approx(
        {"p50": 5000.0, "p90": 9000.0, "p99": 9900.0}
    )
