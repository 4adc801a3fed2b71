"""Rules for chains: token verification, block verification, and acceptance at a given rate.

The first two are lossless, and at temperature 0 they compare the drafted prefix with the target's argmax. Both accept the longest
prefix that passes its test; they differ in the running ratio of target and draft, which block verification never lets pass 1.
"""

import torch
from torch import Tensor

from specheads.decoding.verification.rule import LARGEST_LOG_WEIGHT, AcceptanceDistribution, Block, VerificationRule
from specheads.pair.sampling import accept_prob
from specheads.settings import Probability, check


def token_distribution(block: Block) -> AcceptanceDistribution:
    """Accept each drafted token with `min(1, t / d)`, up to the first rejection (Leviathan et al. 2023, algorithm 1)."""
    draft_prob, target_prob = block.drafted_probs()
    passes = torch.where(block.within, accept_prob(target_prob, draft_prob), 0.0)
    return AcceptanceDistribution(survival=passes.cumprod(dim=1), weights=torch.ones_like(passes), block=block)


class TokenVerification(VerificationRule):
    """`verification=token`: see `token_distribution`."""

    name = compile_key = "token"
    label = "token verification"
    distribution = staticmethod(token_distribution)


def block_distribution(block: Block) -> AcceptanceDistribution:
    """Accept the longest prefix of each block that passes its test (Sun et al. 2024, algorithm 2)."""
    return prefix_distribution(block, reflected(block.log_ratios()))


def reflected(log_ratios: Tensor) -> Tensor:
    """Return log p_i (B, K), `p_i = min(1, p_{i-1} exp(log_ratios_i))`, p_0 = 1."""
    if not log_ratios.shape[1]:
        return log_ratios
    # A walk that may not exceed 0 is the free walk minus the largest height it has reached so far.
    walk = log_ratios.cumsum(dim=1)
    return walk - walk.cummax(dim=1).values.clamp_min(0)


def prefix_distribution(block: Block, log_weights: Tensor) -> AcceptanceDistribution:
    """Return the acceptance distribution of the rule that accepts the longest prefix of a block that passes its test.

    A prefix of i < K tokens passes with probability `E / (E + 1 - p_i)`, `E = sum (p_i t - d)+` over the token after it, and with
    certainty where p_i >= 1; all K tokens pass with `min(1, p_K)`. `log_weights` (B, K) float64 are log p_i, the running ratio.
    """
    weights = log_weights.clamp_max(LARGEST_LOG_WEIGHT).exp()
    before = torch.nn.functional.pad(weights, (1, 0), value=1.0)[:, : weights.shape[1]]  # p_0 .. p_{K-1}
    last = torch.arange(1, block.num_drafted + 1, device=weights.device) == block.lengths[:, None]
    reach = before[:, :, None].to(block.target_probs.dtype) * block.target_probs[:, :-1]
    excess = (reach - block.draft_probs).clamp_min(0).sum(dim=-1).double()
    excess = excess.roll(-1, dims=1)  # prefix i + 1 comes next to prefix i; the last one is tested differently
    missing = (1 - weights).clamp_min(0)
    # With p_i >= 1 nothing is missing and the prefix passes, also where the excess is 0.
    inner = torch.where(missing > 0, excess / (excess + missing.clamp_min(torch.finfo(missing.dtype).tiny)), 1.0)
    passes = torch.where(last, weights.clamp_max(1.0), inner)
    passes = torch.where(block.within, passes, 0.0)
    survival = 1 - (1 - passes).flip(1).cumprod(dim=1).flip(1)
    return AcceptanceDistribution(survival=survival, weights=before, block=block)


class BlockVerification(VerificationRule):
    """`verification=block`: see `block_distribution`."""

    name = compile_key = "block"
    label = "block verification"
    distribution = staticmethod(block_distribution)


class SyntheticVerification(VerificationRule):
    """`verification=synthetic`: tokens are accepted with probability `rate` up to a rejection; not the target's output."""

    name = "synthetic"
    lossless = False

    def __init__(self, rate: float = 0.8) -> None:
        check("verification.rate", rate, Probability, "the probability that a drafted token is accepted, for example 0.8")
        self.rate = rate
        self.compile_key = ("synthetic", rate)
        self.label = f"synthetic acceptance at rate {rate:g}"

    def distribution(self, block: Block) -> AcceptanceDistribution:
        passes = torch.where(block.within, self.rate, 0.0)
        return AcceptanceDistribution(survival=passes.cumprod(dim=1), weights=None, block=block)
