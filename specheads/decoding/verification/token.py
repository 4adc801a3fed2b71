"""Token verification (Leviathan et al. 2023; Chen et al. 2023): each drafted token is tested on its own, in order.

Emits exactly the target's law whatever the draft proposes. With a point mass as the law (temperature 0) it is the
comparison of the drafted prefix with the target's argmax.
"""

import torch
from torch import Tensor

from specheads.decoding.records import Verdict
from specheads.decoding.verification.chain_distribution import AcceptanceDistribution, Block
from specheads.decoding.verification.step import ChainVerification
from specheads.sampling import accept_prob, uniforms


def token_distribution(block: Block) -> AcceptanceDistribution:
    """Return the law of `token_verification`."""
    drafted, wanted = block.drafted_probs()
    passes = torch.where(block.within, accept_prob(wanted, drafted), 0.0)
    return AcceptanceDistribution(survival=passes.cumprod(dim=1), weights=torch.ones_like(passes), block=block)


def token_verification(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    generator: torch.Generator,
    lengths: Tensor | None = None,
) -> Verdict:
    """Accept each drafted token with `min(1, t / d)` up to the first rejection, then draw one token of the target's.

    Args:
        draft_tokens: (B, K) long.
        draft_probs: (B, K, V), the warped law each was drawn from.
        target_probs: (B, K + 1, V), the target's warped law at each drafted position and after the last.
        generator: the only source of randomness, on the tensors' device.
        lengths: (B,) long, tokens drafted per row; default K.

    Raises:
        ValueError: shapes that do not fit together.

    Source: Leviathan et al. 2023, algorithm 1.
    """
    block = Block.of(draft_tokens, draft_probs, target_probs, lengths)
    return token_distribution(block).decide(*uniforms((2, len(draft_tokens)), generator))


class TokenVerification(ChainVerification):
    """`verification=token`: see `token_verification`."""

    compile_key = "token"
    label = "token verification"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        return token_distribution(block)
