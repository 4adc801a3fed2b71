"""The loss of heads: weighted binary cross-entropy with soft labels (SpecDec++, section 3.3)."""

import torch
from torch import Tensor


def weighted_bce(
    logits: Tensor, labels: Tensor, reject_weight: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of losses and the sum of weights over positions.

    Their ratio over all positions is the loss.

    They are returned separately so that a batch spread over devices can be divided by its global
    sum of weights.

    Args:
        logits: (N,) of the acceptance probability.
        labels: (N,) acceptance probabilities in [0, 1].
    """
    reject = reject_weight * (1 - labels)
    losses = labels * torch.nn.functional.softplus(-logits) + reject * torch.nn.functional.softplus(
        logits
    )
    return losses.sum(), (labels + reject).sum()
