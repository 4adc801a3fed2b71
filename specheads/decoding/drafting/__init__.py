"""How drafts are proposed."""

from specheads.decoding.drafting.autoregressive import Autoregressive, ChainDrafter, ChainStep, DraftMemory, drafting_features

__all__ = ["Autoregressive", "ChainDrafter", "ChainStep", "DraftMemory", "drafting_features"]
