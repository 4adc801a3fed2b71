"""Joint verification (MJSD): a chain is accepted as far as its joint probability under the target is large enough.

Lossy by design: a likely token may make up for an unlikely one before it, and the output is more likely than samples are.
"""

from specheads.decoding.records import CHAIN
from specheads.decoding.verification.rule import AcceptanceDistribution, Block, ChainVerification
from specheads.errors import UserError, is_number
from specheads.papers.trees.distribution import BEAM


def joint_distribution(block: Block, threshold: float) -> AcceptanceDistribution:
    """Return the acceptance distribution of `verification=joint`.

    The longest prefix is accepted whose `min(1, T / D)` exceeds `threshold`, where T and D are the joint probabilities of its
    tokens under target and draft; a longer prefix may pass although a shorter one failed.
    """
    ratio = block.log_ratios().cumsum(dim=1).exp().clamp_max(1.0)
    passes = ((ratio > threshold) & block.within).double()
    return AcceptanceDistribution(survival=passes.flip(1).cummax(dim=1).values.flip(1), weights=None, block=block)


class JointVerification(ChainVerification):
    """`verification=joint`: see `joint_distribution`.

    Args:
        threshold: in [0, 1), tau of the paper.

    Source: Qin et al. 2024 (multi-token joint speculative decoding), algorithm 1.
    """

    name = "joint"
    lossless = False
    takes = frozenset({BEAM, CHAIN})

    def __init__(self, threshold: float = 0.1) -> None:
        if not is_number(threshold) or not 0 <= threshold < 1:
            raise UserError(
                f"verification.threshold={threshold} must be at least 0 and below 1; it is what the ratio of joint "
                "probabilities must exceed, for example 0.1."
            )
        self.threshold = threshold
        self.compile_key = ("joint", threshold)
        self.label = f"joint verification, threshold {threshold:g}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        return joint_distribution(block, self.threshold)
