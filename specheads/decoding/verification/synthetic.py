"""Acceptance at a given rate whatever the models say: to time an engine, never to write text."""

import torch

from specheads.decoding.verification.chain_distribution import AcceptanceDistribution, Block
from specheads.decoding.verification.step import ChainVerification
from specheads.errors import UserError, is_number


class SyntheticVerification(ChainVerification):
    """`verification=synthetic`: each drafted token is accepted with probability `rate` up to the first rejection.

    The output is not the target's; whatever reports its figures says so.
    """

    lossless = False

    def __init__(self, rate: float = 0.8) -> None:
        if not is_number(rate) or not 0 <= rate <= 1:
            raise UserError(f"verification.rate={rate} is outside [0, 1]; it is the chance that a drafted token is accepted.")
        self.rate = rate
        self.compile_key = ("synthetic", rate)

    @property
    def label(self) -> str:
        return f"synthetic acceptance at rate {self.rate:g}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        passes = torch.where(block.within, self.rate, 0.0)
        return AcceptanceDistribution(survival=passes.cumprod(dim=1), weights=None, block=block)
