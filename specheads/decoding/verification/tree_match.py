"""Matching (SpecInfer's greedy and typical use of trees): the target draws its own token, and the walk goes on where the draft has it.

Lossless for every tree that was fixed before the target drew, however its tokens came about.
"""

import torch

from specheads.decoding.verification.tree_distribution import TreeBlock, TreeDistribution, TreeVerification


def tree_match_distribution(block: TreeBlock) -> TreeDistribution:
    """Return the law of `verification=tree_match`: a node is moved to with the target's probability of its token."""
    rest, row, token = block.target_probs.clone(), block.parent_row, block.tokens
    moves = rest[row, token].double()
    index = torch.arange(len(token), device=token.device)
    twin = (row[:, None] == row) & (token[:, None] == token) & (index < index[:, None])
    rest[row, token] = 0
    return TreeDistribution(torch.where(twin.any(dim=1), 0.0, moves), rest, block)


class TreeMatch(TreeVerification):
    """`verification=tree_match`: see the head of this file. Source: Miao et al. 2024 (SpecInfer), algorithm 2, VerifyGreedy."""

    compile_key = "tree match"
    label = "tree matching"

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        return tree_match_distribution(block)
