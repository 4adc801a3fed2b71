"""What becomes of the output where a decoder looks at a drafted token before it decides whether to submit it.

A length may depend on the tokens before, never on the token itself: a scheduler that drops improbable tokens is no longer
lossless (DSpark, section on admission, states the condition).
"""

import torch
from torch import Tensor

from specheads.sampling import accept_prob
from specheads.theory.rejections import residual, total_variation


def output_probs(target: Tensor, draft: Tensor, submitted: Tensor) -> Tensor:
    """Return the distribution (V,) of the next token where a drafted token is submitted with a probability that depends on it.

    A submitted token is verified; where none is, the target samples.

    Args:
        target, draft: (V,).
        submitted: (V,), the probability that each drafted token is submitted.
    """
    accepted = draft * submitted * accept_prob(target, draft)
    rejected = (draft * submitted).sum() - accepted.sum()
    dropped = (draft * (1 - submitted)).sum()
    return accepted + rejected * residual(target, draft) + dropped * target


def bias(target: Tensor, draft: Tensor, submitted: Tensor) -> float:
    """Return the total variation between the target and the output; see `output_probs`."""
    return total_variation(target, output_probs(target, draft, submitted)).item()


def where_draft_is_sure(draft: Tensor, least: float) -> Tensor:
    """Return probabilities (V,) of 0 and 1 that submit tokens which the draft gives at least this probability."""
    return (draft >= least).to(torch.float64)
