"""How drafts are proposed.

A new method is a module with a Drafting (drafter.py) and a config in conf/drafting/. Its drafter either fills the memory for
chains or, as a TreeDrafter (tree_growth.py), chooses the tokens of each level and those from which the tree grows on.
"""

from specheads.decoding.drafting.autoregressive import Autoregressive, ChainDrafter, ChainStep
from specheads.decoding.drafting.beam import Beam
from specheads.decoding.drafting.draft_memory import DraftMemory
from specheads.decoding.drafting.drafter import Drafter, Drafting
from specheads.decoding.drafting.layer_skip import LayerSkip
from specheads.decoding.drafting.lookup import Lookup
from specheads.decoding.drafting.multi import Multi
from specheads.decoding.drafting.token_graph import Graph
from specheads.decoding.drafting.token_tree import Tree

__all__ = [
    "Autoregressive",
    "Beam",
    "ChainDrafter",
    "ChainStep",
    "DraftMemory",
    "Drafter",
    "Drafting",
    "Graph",
    "LayerSkip",
    "Lookup",
    "Multi",
    "Tree",
]
