"""Calibrations of heads fit, and logistics end where their gradient vanishes."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from properties.strategies import probabilities, tries
from torch.nn.functional import binary_cross_entropy_with_logits

from specheads.heads.calibration import NUM_INDICES, IndexCalibration, Indices
from specheads.heads.metrics import fit_logistic

logits = st.sampled_from([-30.0, -1.0, 0.0, 1.0, 30.0]) | st.floats(-20, 20)
labels = st.sampled_from([0.0, 0.5, 1.0]) | probabilities()


def vectors(*columns, **sizes):
    """Return tensors (N,), one for each strategy."""
    rows = st.lists(st.tuples(*columns), **{"min_size": 1, "max_size": 20} | sizes)
    return rows.map(
        lambda given: [
            torch.tensor(column, dtype=torch.float64) for column in zip(*given, strict=True)
        ]
    )


@st.composite
def numbered(draw, *columns):
    """Return tensors (N,), and an index (N,) long."""
    given = draw(vectors(*columns, st.integers(0, NUM_INDICES + 2)))
    return *given[:-1], given[-1].long()


@tries(2)
@given(numbered(logits, st.sampled_from([0.0, 1.0])), st.floats(1, 5000))
def test_a_fitted_calibration_is_finite_and_fits_better_than_none(rows, prior):
    logit, accepted, furthest = rows
    fitted = IndexCalibration.fit(logit, accepted, Indices.up_to(furthest), prior=prior)
    assert len(fitted.slope) == len(fitted.intercept) == NUM_INDICES
    assert all(map(math.isfinite, [*fitted.slope, *fitted.intercept]))
    share = prior / len(logit)
    labels = (accepted + share * logit.sigmoid()) / (1 + share)
    for index in range(NUM_INDICES):
        here = (furthest >= index).double()
        weight = here + share
        target = (here * accepted + share * labels) / (here + share)
        losses = [
            binary_cross_entropy_with_logits(scores, target, weight, reduction="sum")
            for scores in (fitted.slope[index] * logit + fitted.intercept[index], logit)
        ]
        assert losses[0] <= losses[1] + 1e-6 * (1 + losses[1])


@tries(3)
@given(vectors(logits, logits, labels, st.sampled_from([0.1, 1.0, 3.0]), min_size=3))
def test_the_gradient_of_a_fitted_logistic_vanishes_unless_it_separates(rows):
    """Where a line separates the labels there is no best one: its weights are finite all the
    same.
    """
    first, second, label, counts = rows
    features = torch.stack([first, second], dim=1)
    fitted = fit_logistic(features, label, counts)
    assert fitted.isfinite().all()
    soft = label.clamp(0.05, 0.95)
    fitted = fit_logistic(features, soft, counts)
    inputs = torch.cat([features, torch.ones(len(features), 1)], dim=1)
    gradient = inputs.T @ (counts * ((inputs @ fitted).sigmoid() - soft))
    assert gradient.abs().max() < 1e-4 * inputs.abs().sum()
