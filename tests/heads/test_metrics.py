import math

import pytest
import torch

from specheads.heads.metrics import (
    auroc,
    binary_kl,
    brier,
    calibration,
    calibration_error,
    fit_logistic,
    prediction_metrics,
)


def soft_labels(count, seed=0, hard=0):
    """Labels in [0, 1] of which the first `hard` are 0 or 1."""
    labels = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    labels[:hard] = labels[:hard].round()
    return labels


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- AUROC


def auroc_by_pairs(scores, labels):
    """Every pair of an accepted and a rejected draw, weighted by how likely it is."""
    wins = pairs = 0.0
    for score, accepted in zip(scores.tolist(), labels.tolist(), strict=True):
        for other, label in zip(scores.tolist(), labels.tolist(), strict=True):
            weight = accepted * (1 - label)
            pairs += weight
            wins += weight * (1.0 if score > other else 0.5 if score == other else 0.0)
    return wins / pairs


@pytest.mark.parametrize("hard", [0, 20, 60])
@pytest.mark.parametrize("ties", [False, True])
def test_auroc_counts_pairs_of_soft_labels_and_half_of_ties(hard, ties):
    scores = normal(60, seed=1)
    labels = soft_labels(60, hard=hard)
    scores = (2 * scores).round() if ties else scores
    assert len(scores.unique()) < 20 if ties else len(scores.unique()) == 60
    assert auroc(scores, labels) == pytest.approx(auroc_by_pairs(scores, labels), abs=1e-12)


def test_auroc_of_float32_input_is_computed_in_float64():
    scores = normal(3000, seed=1).float()
    labels = soft_labels(3000).float()
    assert auroc(scores, labels) == pytest.approx(
        auroc(scores.double(), labels.double()), abs=1e-12
    )


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_auroc_without_accepted_or_without_rejected_samples_is_not_a_number(label):
    assert math.isnan(auroc(normal(10), torch.full((10,), label)))


# --- binary KL


def kl(a, p):
    return sum(x * math.log(x / y) for x, y in ((a, p), (1 - a, 1 - p)) if x > 0)


@pytest.mark.parametrize("hard", [0, 25, 50])
def test_binary_kl_is_its_formula_with_zero_log_zero_as_zero(hard):
    logits = 2 * normal(50)
    labels = soft_labels(50, hard=hard)
    expected = (
        sum(kl(a, p) for a, p in zip(labels.tolist(), torch.sigmoid(logits).tolist(), strict=True))
        / 50
    )
    assert binary_kl(logits, labels).item() == pytest.approx(expected, abs=1e-12)


# --- Brier score


def test_brier_is_the_expected_squared_error_against_samples():
    probs = soft_labels(40, seed=1)
    labels = soft_labels(40, hard=10)
    expected = (
        sum(
            a * (p - 1) ** 2 + (1 - a) * p**2
            for p, a in zip(probs.tolist(), labels.tolist(), strict=True)
        )
        / 40
    )
    assert brier(probs, labels) == pytest.approx(expected, abs=1e-12)


# --- calibration


def test_calibration_of_an_example_worked_by_hand():
    probs = torch.tensor([0.05, 0.15, 0.45, 0.35, 1.0, 0.8], dtype=torch.float64)
    labels = torch.tensor([0.0, 0.5, 1.0, 0.0, 0.75, 1.0], dtype=torch.float64)
    # [0, 0.2) [0.2, 0.4) [0.4, 0.6) [0.6, 0.8) [0.8, 1]; the fourth is empty
    curve = calibration(probs, labels, num_bins=5)
    torch.testing.assert_close(curve.share, torch.tensor([2, 1, 1, 2], dtype=torch.float64) / 6)
    torch.testing.assert_close(
        curve.predicted, torch.tensor([0.1, 0.35, 0.45, 0.9], dtype=torch.float64)
    )
    torch.testing.assert_close(
        curve.observed, torch.tensor([0.25, 0.0, 1.0, 0.875], dtype=torch.float64)
    )
    assert curve.ece == pytest.approx((2 * 0.15 + 0.35 + 0.55 + 2 * 0.025) / 6)


def test_predictions_of_exactly_zero_and_one_are_in_the_outer_bins():
    curve = calibration(torch.tensor([0.0, 1.0]), torch.tensor([0.25, 0.5]))
    assert (curve.share.tolist(), curve.predicted.tolist(), curve.observed.tolist()) == (
        [0.5, 0.5],
        [0, 1],
        [0.25, 0.5],
    )


def test_the_error_of_two_parts_is_their_mean_by_tokens():
    """Shifts of the parts in opposite directions do not cancel."""
    labels = torch.full((6,), 0.5, dtype=torch.float64)
    shift = torch.tensor([0.1, 0.1, 0.1, 0.1, -0.2, -0.2], dtype=torch.float64)
    logits = (labels + shift).logit()
    assert calibration_error(logits, labels, shift > 0) == pytest.approx((4 * 0.1 + 2 * 0.2) / 6)
    first = torch.arange(6) < 3
    whole = calibration_error(logits[first], labels[first])
    assert whole == pytest.approx(0.1) == calibration(labels[:3] + 0.1, labels[:3]).ece


# --- all of them


def test_prediction_metrics_are_the_four_metrics():
    logits = normal(100)
    labels = soft_labels(100, hard=30)
    probs = torch.sigmoid(logits)
    assert prediction_metrics(logits, labels) == {
        "kl": binary_kl(logits, labels).item(),
        "auroc": auroc(logits, labels),
        "brier": brier(probs, labels),
        "ece": calibration(probs, labels).ece,
    }


# --- the logistic


WEIGHTS = torch.tensor([0.7, -2.0, 0.0, 0.4], dtype=torch.float64)


def gradient(weights, features, labels):
    inputs = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], dim=1)
    return inputs.T @ (torch.sigmoid(inputs @ weights) - labels) / len(labels)


def test_a_logistic_recovers_the_weights_that_made_its_soft_labels():
    features = normal(300, 3)
    labels = torch.sigmoid(features @ WEIGHTS[:-1] + WEIGHTS[-1])
    # the ridge moves them by about 1e-9 times the inverse curvature
    torch.testing.assert_close(fit_logistic(features, labels), WEIGHTS, atol=1e-6, rtol=0)


@pytest.mark.parametrize("count", [50, 400])
def test_a_ridge_pulls_each_samples_share_of_the_weights_to_zero(count):
    features = normal(count, 3)
    labels = soft_labels(count)
    weights = fit_logistic(features, labels, ridge=0.1)
    free = fit_logistic(features, labels)
    torch.testing.assert_close(
        gradient(weights, features, labels), -0.1 * weights, atol=1e-9, rtol=0
    )
    assert weights.norm() < free.norm()


def test_a_logistic_with_a_repeated_feature_still_predicts_right():
    features = normal(300, 3)
    labels = torch.sigmoid(features @ WEIGHTS[:-1] + WEIGHTS[-1])
    doubled = torch.cat([features, features[:, 1:2]], dim=1)
    weights = fit_logistic(doubled, labels)
    torch.testing.assert_close(
        torch.sigmoid(doubled @ weights[:-1] + weights[-1]), labels, atol=1e-6, rtol=0
    )
    assert weights[1] + weights[3] == pytest.approx(-2.0, abs=1e-5)
