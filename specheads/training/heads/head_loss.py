"""The loss of heads: weighted binary cross-entropy with soft labels (SpecDec++, section 3.2)."""

import torch
from torch import Tensor


def weighted_bce(
    logits: Tensor, labels: Tensor, accept_weight: float = 1.0, reject_weight: float = 1.0, alive: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of losses and the sum of weights over positions; their ratio over all positions is the loss.

    They are returned separately so that a batch spread over devices can be divided by its global sum of weights.

    Args:
        logits: (N,) of the acceptance probability.
        labels: (N,) acceptance probabilities in [0, 1], NaN where there is nothing to learn.
        alive: (N,) another weight of each position.
    """
    counts = (~labels.isnan()).to(labels.dtype) * alive
    labels = labels.nan_to_num(0.0)
    accept, reject = counts * accept_weight * labels, counts * reject_weight * (1 - labels)
    losses = accept * torch.nn.functional.softplus(-logits) + reject * torch.nn.functional.softplus(logits)
    return losses.sum(), (accept + reject).sum()
