"""Acceptance at a given rate whatever the models say: to time an engine, never to write text."""

import torch

from specheads.decoding.arguments import check_probability
from specheads.decoding.verification.chain_distribution import AcceptanceDistribution, Block
from specheads.decoding.verification.verify_step import ChainVerification


class SyntheticVerification(ChainVerification):
    """`verification=synthetic`: each drafted token is accepted with probability `rate` up to the first rejection.

    The output does not follow the target; reports say so.
    """

    name = "synthetic"
    lossless = False

    def __init__(self, rate: float = 0.8) -> None:
        check_probability("verification.rate", rate, "the probability that a drafted token is accepted, for example 0.8")
        self.rate = rate
        self.compile_key = ("synthetic", rate)
        self.label = f"synthetic acceptance at rate {rate:g}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        passes = torch.where(block.within, self.rate, 0.0)
        return AcceptanceDistribution(survival=passes.cumprod(dim=1), weights=None, block=block)
