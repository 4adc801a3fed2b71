"""Biased verification (Yin et al. 2024): more drafted tokens pass than the target's distribution allows, by a chosen margin."""

from typing import Literal, get_args

import torch

from specheads.decoding.verification.rule import AcceptanceDistribution, Block, VerificationRule
from specheads.pair.sampling import accept_prob
from specheads.settings import Probability, check

Mode = Literal["opt", "uno"]
MODES = get_args(Mode)


class BiasedVerification(VerificationRule):
    """`verification=biased`: each drafted token passes with `b = min(1, (t + eps) / d)`. Lossy unless `eps` is 0 and `mode` opt.

    A rejection is followed by a token of `norm((t - b d)+)`, which is `norm((t - d)+)` whatever eps (`mode="opt"`, the least bias
    that these probabilities allow), or of the target (`mode="uno"`).

    Source: Yin et al. 2024, section 4.
    """

    name = "biased"

    def __init__(self, eps: float = 0.1, mode: str = "opt") -> None:
        check("verification.eps", eps, Probability, "the margin added to the target's probability, for example 0.1")
        check("verification.mode", mode, Mode)
        self.eps, self.mode = eps, mode
        self.compile_key = ("biased", eps, mode)
        self.lossless = eps == 0 and mode == "opt"
        self.label = f"biased verification, eps {eps:g}, {mode}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        draft_prob, target_prob = block.drafted_probs()
        passes = torch.where(block.within, accept_prob(target_prob + self.eps, draft_prob), 0.0)
        weights = torch.ones_like(passes) if self.mode == "opt" else None
        return AcceptanceDistribution(survival=passes.cumprod(dim=1), weights=weights, block=block)
