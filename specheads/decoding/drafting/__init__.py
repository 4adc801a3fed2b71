"""Ways to propose tokens; each yields steps until the stopping rule has had enough."""

from specheads.decoding.drafting.autoregressive import Autoregressive, Step, drafting_features

__all__ = ["Autoregressive", "Step", "drafting_features"]
