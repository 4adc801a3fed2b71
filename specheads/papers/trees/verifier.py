"""The base of rules for trees, and how the tokens of a tree are chosen."""

from specheads.decoding.verification import Verification
from specheads.papers.trees.distribution import TreeBlock, TreeDistribution

# How the tokens of a tree were chosen.
IID = "a tree of i.i.d. samples"
DISTINCT = "a tree of samples without replacement"
CHOSEN = "a tree of chosen tokens"
BEAM = "the best beam"


class TreeVerification(Verification):
    """The base of rules for trees, which verify each tree whatever happened before."""

    takes = frozenset({IID, DISTINCT, CHOSEN, BEAM})
    shared_logits: bool = False  # whether it verifies a graph's node by the distribution after the node that it repeats

    def distribution(self, block: TreeBlock) -> TreeDistribution:
        """Return the distribution of the outcome."""
        raise NotImplementedError
