"""Token verification (Leviathan et al. 2023; Chen et al. 2023): each drafted token is tested separately, in order.

The output distribution is exactly the target's, whatever the draft proposes. With point masses (temperature 0) the rule is the
comparison of the drafted prefix with the target's argmax.
"""

import torch
from torch import Tensor

from specheads.decoding.records import Verdict
from specheads.decoding.verification.chain_distribution import AcceptanceDistribution, Block
from specheads.decoding.verification.verify_step import ChainVerification
from specheads.pair.sampling import accept_prob, uniforms


def token_distribution(block: Block) -> AcceptanceDistribution:
    """Return the acceptance distribution of `token_verification`."""
    draft_prob, target_prob = block.drafted_probs()
    passes = torch.where(block.within, accept_prob(target_prob, draft_prob), 0.0)
    return AcceptanceDistribution(survival=passes.cumprod(dim=1), weights=torch.ones_like(passes), block=block)


def token_verification(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    generator: torch.Generator,
    lengths: Tensor | None = None,
) -> Verdict:
    """Accept each drafted token with `min(1, t / d)` up to the first rejection, then sample one token from the target.

    Args:
        draft_tokens: (B, K) long.
        draft_probs: (B, K, V), the warped distribution that each was sampled from.
        target_probs: (B, K + 1, V), the target's warped distribution at each drafted position and after the last.
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

    name = compile_key = "token"
    label = "token verification"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        return token_distribution(block)
