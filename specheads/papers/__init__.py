"""Methods, theory and experiments of papers.

They use the core as a user's own code does, and the core does not know them.
"""

from specheads.papers.biased import BiasedVerification, BigLittle
from specheads.papers.gsd import Graph, Tree
from specheads.papers.layer_skip import LayerSkip
from specheads.papers.mjsd import Beam, BlockSearch, JointVerification
from specheads.papers.spectr import Multi, SpecTr
from specheads.papers.trees.verification import MultiRound, TreeMatch

__all__ = [
    "Beam",
    "BiasedVerification",
    "BigLittle",
    "BlockSearch",
    "Graph",
    "JointVerification",
    "LayerSkip",
    "Multi",
    "MultiRound",
    "SpecTr",
    "Tree",
    "TreeMatch",
]
