"""Methods, theory and experiments of papers. They use the core as a user's own code does, and the core does not know them."""

from specheads.papers.biased import BiasedVerification
from specheads.papers.bild import BigLittle
from specheads.papers.block import GreedyBlockVerification
from specheads.papers.gsd import Graph, Tree
from specheads.papers.layer_skip.layer_skip import LayerSkip
from specheads.papers.lookup import Lookup
from specheads.papers.mjsd.beam import Beam
from specheads.papers.mjsd.block_search import BlockSearch
from specheads.papers.mjsd.joint import JointVerification
from specheads.papers.spectr.multi import Multi
from specheads.papers.spectr.spectr import SpecTr
from specheads.papers.trees.multi_round import MultiRound
from specheads.papers.trees.tree_match import TreeMatch

__all__ = [
    "Beam",
    "BiasedVerification",
    "BigLittle",
    "BlockSearch",
    "Graph",
    "GreedyBlockVerification",
    "JointVerification",
    "LayerSkip",
    "Lookup",
    "Multi",
    "MultiRound",
    "SpecTr",
    "Tree",
    "TreeMatch",
]
