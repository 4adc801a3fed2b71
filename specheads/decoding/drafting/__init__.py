"""How drafts are proposed.

A new way is a module with a Drafting (drafter.py), whose drafter either fills the memory for chains or, on TreeDrafter (growth.py), says
what a level's tokens are and which of them go on. Its config goes to conf/drafting/.
"""

from specheads.decoding.drafting.autoregressive import Autoregressive, ChainDrafter, ChainStep
from specheads.decoding.drafting.beam import Beam
from specheads.decoding.drafting.drafter import Drafter, Drafting
from specheads.decoding.drafting.graph import Graph
from specheads.decoding.drafting.layer_skip import LayerSkip
from specheads.decoding.drafting.lookup import Lookup
from specheads.decoding.drafting.memory import DraftMemory
from specheads.decoding.drafting.multi import Multi
from specheads.decoding.drafting.tree import Tree

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
