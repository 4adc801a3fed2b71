"""How drafts are proposed.

A new method is a module with a Drafting (drafter.py) and a config in conf/drafting/ whose `_target_` names it.
"""

from specheads.decoding.drafting.autoregressive import Autoregressive, ChainDrafter, ChainStep
from specheads.decoding.drafting.drafter import Drafting

__all__ = ["Autoregressive", "ChainDrafter", "ChainStep", "Drafting"]
