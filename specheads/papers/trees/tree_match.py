"""Matching (SpecInfer's greedy rule): the target samples a token, and the walk continues at the child that has it.

Lossless for every tree that was fixed before the target sampled, however its tokens were chosen. Not so with shared logits, where
a node of a graph is verified by what follows another node.
"""

import torch

from specheads.decoding.arguments import check_flag
from specheads.papers.trees.distribution import TreeBlock, TreeDistribution, TreeVerification


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

    Args:
        shared_logits: verify a node of a graph by the target's distribution after the node that it repeats, instead of after its
            path: what a target that read the graph itself, without the copies, would do. The copies are read all the same, so
            this shows only what such a saving would cost. It is lossy, unless the target's next token depends on the last `tau`
            tokens alone: the total variation of three tokens is 0.11 (0.04 to 0.21) for random targets over three tokens.

    Source: Miao et al. 2024 (SpecInfer), algorithm 2, VerifyGreedy. `shared_logits` has no source: the code of GSD (Gong et al.
    2024, github.com/gzhch/gsd) makes a tree of the graph before the target reads it.
    """

    name = "tree_match"

    def __init__(self, shared_logits: bool = False) -> None:
        check_flag("verification.shared_logits", shared_logits)
        self.shared_logits, self.lossless = shared_logits, not shared_logits
        self.compile_key = ("tree match", shared_logits)
        self.label = "tree matching, shared logits" if shared_logits else "tree matching"

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        return tree_match_distribution(block)
