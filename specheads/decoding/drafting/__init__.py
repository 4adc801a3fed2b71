"""How drafts are proposed."""

from specheads.decoding.drafting.autoregressive import Autoregressive, ChainDrafter, ChainStep, drafting_features

__all__ = ["Autoregressive", "ChainDrafter", "ChainStep", "drafting_features"]
