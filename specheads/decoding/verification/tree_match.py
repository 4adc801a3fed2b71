"""Matching (SpecInfer's greedy rule): the target samples a token, and the walk continues at the child that has it.

Lossless for every tree that was fixed before the target sampled, however its tokens were chosen.
"""

import torch

from specheads.decoding.verification.tree_distribution import TreeBlock, TreeDistribution, TreeVerification


def tree_match_distribution(block: TreeBlock) -> TreeDistribution:
    """Return the distribution of `verification=tree_match`: a move has the target's probability of the node's token."""
    rest, row, token = block.target_probs.clone(), block.parent_row, block.tokens
    moves = rest[row, token].double()
    index = torch.arange(len(token), device=token.device)
    repeats = (row[:, None] == row) & (token[:, None] == token) & (index < index[:, None])
    rest[row, token] = 0
    return TreeDistribution(torch.where(repeats.any(dim=1), 0.0, moves), rest, block)


class TreeMatch(TreeVerification):
    """`verification=tree_match`: see `tree_match_distribution`.

    Source: Miao et al. 2024 (SpecInfer), algorithm 2, VerifyGreedy.
    """

    name = "tree_match"
    compile_key = "tree match"
    label = "tree matching"

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        return tree_match_distribution(block)
