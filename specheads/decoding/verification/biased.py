"""Biased verification (Yin et al. 2024): more drafted tokens pass than the target's law allows, by a margin of one's choice."""

import torch

from specheads.decoding.verification.chain_distribution import AcceptanceDistribution, Block
from specheads.decoding.verification.step import ChainVerification
from specheads.errors import UserError, is_number
from specheads.sampling import accept_prob

MODES = ("opt", "uno")


class BiasedVerification(ChainVerification):
    """`verification=biased`: each drafted token passes with `b = min(1, (t + eps) / d)`. Lossy unless `eps` is 0 and `mode` opt.

    A rejection is followed by a token of `norm((t - b d)+)`, which is `norm((t - d)+)` whatever eps (`mode="opt"`, the least bias
    there is for these chances), or of the target itself (`mode="uno"`).

    Source: Yin et al. 2024, section 4.
    """

    def __init__(self, eps: float = 0.1, mode: str = "opt") -> None:
        if not is_number(eps) or not 0 <= eps <= 1:
            raise UserError(
                f"verification.eps={eps} is outside [0, 1]; it is added to the target's probability, for example 0.1."
            )
        if mode not in MODES:
            raise UserError(f"verification.mode={mode!r} is not known; use one of {', '.join(MODES)}.")
        self.eps, self.mode = eps, mode
        self.compile_key = ("biased", eps, mode)

    @property
    def lossless(self) -> bool:
        return self.eps == 0 and self.mode == "opt"

    @property
    def label(self) -> str:
        return f"biased verification, eps {self.eps:g}, {self.mode}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        drafted, wanted = block.drafted_probs()
        passes = torch.where(block.within, accept_prob(wanted + self.eps, drafted), 0.0)
        weights = torch.ones_like(passes) if self.mode == "opt" else None
        return AcceptanceDistribution(survival=passes.cumprod(dim=1), weights=weights, block=block)
