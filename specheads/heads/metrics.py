"""Metrics of acceptance predictions against soft labels, the known acceptance probabilities, as
expectations over outcomes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CONVERGED = 1e-10  # the size of a Newton step, over that of the weights, after which none is needed


@dataclass(frozen=True)
class Calibration:
    """A reliability curve: for each bin the share of positions, the mean prediction and the mean
    label; `ece` summarises it.
    """

    share: Tensor
    predicted: Tensor
    observed: Tensor

    @property
    def ece(self) -> float:
        """The expected calibration error: the mean distance between prediction and label over
        bins.
        """
        return (self.share * (self.predicted - self.observed).abs()).sum().item()


def binary_kl(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean `a* log(a*/a) + (1-a*) log((1-a*)/(1-a))` in nats over positions (N,), with 0
    log 0 = 0.
    """
    cross = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    return cross - (torch.special.entr(labels) + torch.special.entr(1 - labels)).mean()


def auroc(scores: Tensor, labels: Tensor) -> float:
    """Return the chance that an accepted outcome has a higher score than a rejected one, where ties
    count half.

    A position (N,) is accepted with weight `labels`, else rejected. NaN for one kind of outcome.
    """
    _, group = torch.unique(scores, return_inverse=True)
    accepted, rejected = (
        torch.bincount(group, weights) for weights in (labels.double(), 1 - labels.double())
    )
    below = rejected.cumsum(0) - rejected
    return ((accepted * (below + rejected / 2)).sum() / (accepted.sum() * rejected.sum())).item()


def brier(probs: Tensor, labels: Tensor) -> float:
    """Return the expected squared error of predictions (N,) against sampled outcomes."""
    return ((probs - labels) ** 2 + labels * (1 - labels)).mean().item()


def calibration(probs: Tensor, labels: Tensor, num_bins: int = 15) -> Calibration:
    """Return the reliability curve of predictions (N,) over bins of equal width.

    Empty bins are left out.
    """
    bins = (probs * num_bins).long().clamp(0, num_bins - 1)
    count = torch.bincount(bins, minlength=num_bins).double()
    predicted = torch.bincount(bins, probs.double(), num_bins)
    observed = torch.bincount(bins, labels.double(), num_bins)
    filled = count > 0
    count = count[filled]
    return Calibration(count / count.sum(), predicted[filled] / count, observed[filled] / count)


def calibration_error(logits: Tensor, labels: Tensor, first: Tensor | None = None) -> float:
    """Return the expected calibration error of logits (N,).

    With `first` (N,) bool, the mean of those of the two parts that it marks, weighted by their
    tokens.
    """
    parts = (torch.ones_like(labels, dtype=torch.bool),) if first is None else (first, ~first)
    total = 0.0
    for part in parts:
        ece = calibration(torch.sigmoid(logits[part]), labels[part]).ece
        total += part.sum().item() * ece
    return total / max(1, len(labels))


def prediction_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return binary KL, AUROC, Brier score and expected calibration error of logits (N,) against
    labels (N,).
    """
    probs = torch.sigmoid(logits)
    return {
        "kl": binary_kl(logits, labels).item(),
        "auroc": auroc(logits, labels),
        "brier": brier(probs, labels),
        "ece": calibration(probs, labels).ece,
    }


def fit_logistic(
    features: Tensor,
    labels: Tensor,
    counts: Tensor | None = None,
    intercept: bool = True,
    ridge: float = 1e-9,
) -> Tensor:
    """Return weights (F + 1,), the intercept last, of the logistic regression of soft labels (N,)
    on features (N, F), in float64.

    `counts` (N,) are the samples' weights; the ridge, of each, keeps collinear features solvable, a
    larger one separable labels.
    """
    inputs = torch.cat(
        [features.double(), torch.full((len(features), 1), float(intercept), dtype=torch.float64)],
        dim=1,
    )
    weights = torch.zeros(inputs.shape[1], dtype=torch.float64)
    penalty = ridge * max(1, len(inputs)) * torch.eye(inputs.shape[1], dtype=torch.float64)
    counted = inputs if counts is None else inputs * counts.double().unsqueeze(1)
    for _ in range(25):  # Newton steps, which double the correct digits
        probs = torch.sigmoid(inputs @ weights)
        gradient = counted.T @ (probs - labels) + penalty @ weights
        curvature = (counted * (probs * (1 - probs)).unsqueeze(1)).T @ inputs
        step = torch.linalg.solve(curvature + penalty, gradient)
        weights = weights - step
        if step.abs().max() <= CONVERGED * weights.abs().max():
            break
    return weights
