"""Multi-round rejection (SpecInfer): the tokens sampled at a node are tested one after the other.

Each is tested against the target's residual after the earlier rejections, even if the same token was sampled before.
"""

import torch

from specheads.pair.sampling import accept_prob
from specheads.papers.trees.distribution import DISTINCT, IID, TreeBlock, TreeDistribution, TreeVerification


def multi_round_distribution(block: TreeBlock) -> TreeDistribution:
    """Return the acceptance distribution of `verification=multi_round`.

    Without replacement a token's distribution is the draft's without the tokens sampled before it, renormalised.

    Source: Miao et al. 2024 (SpecInfer), algorithm 2, VerifyStochastic; without replacement as in Jeon et al. 2024 (RSD), section
    3.
    """
    target, draft = block.both_probs
    moves = torch.zeros(len(block.tokens), dtype=torch.float64, device=target.device)
    # The probability that all samples so far were rejected.
    reach = torch.ones(len(target), dtype=torch.float64, device=target.device)
    for number in range(block.most_samples):
        there, node = block.samples[:, number] >= 0, block.samples[:, number].clamp_min(0)
        token = block.tokens[node][:, None]
        passes = accept_prob(target.gather(1, token), draft.gather(1, token)).squeeze(1).double()
        passes = torch.where(there, passes, 0.0)
        moves = moves.index_add(0, node, reach * passes)
        reach = reach * (1 - passes)
        residual = (target - draft).clamp_min(0)
        mass = residual.sum(dim=1, keepdim=True)
        target = torch.where(there[:, None] & (mass > 0), residual / mass.clamp_min(torch.finfo(mass.dtype).tiny), target)
        if not block.replacement:
            others = draft.scatter(1, token, 0.0)
            others = others / others.sum(dim=1, keepdim=True).clamp_min(torch.finfo(others.dtype).tiny)
            draft = torch.where(there[:, None], others, draft)
    return TreeDistribution(moves, target, block)


class MultiRound(TreeVerification):
    """`verification=multi_round`: see `multi_round_distribution`."""

    name = "multi_round"
    compile_key = "multi round"
    label = "multi-round verification"
    takes = frozenset({IID, DISTINCT})

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        return multi_round_distribution(block)
