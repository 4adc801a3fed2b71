"""specheads: acceptance-prediction heads (SpecDec++) and draft distillation for speculative decoding."""

from importlib import import_module
from typing import Any

from specheads.decoding import drafting, stopping, verification
from specheads.decoding.decoder import SpeculativeDecoder, generate_baseline
from specheads.errors import UserError
from specheads.heads.checkpoint import load_head, save_head
from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.pair import Pair, load_pair
from specheads.sampling import Warp

__version__ = "0.1.0"

# Imported on first use: they need libraries that decoding does not.
TRAINING = {
    "Distillation": "specheads.training.distill.settings",
    "HeadTraining": "specheads.training.heads.settings",
    "distill": "specheads.training.distill.distillation",
    "train_heads": "specheads.training.heads.head_training",
}

__all__ = [
    "AcceptanceHead",
    "Distillation",
    "HeadConfig",
    "HeadTraining",
    "Pair",
    "SpeculativeDecoder",
    "UserError",
    "Warp",
    "distill",
    "drafting",
    "generate_baseline",
    "load_head",
    "load_pair",
    "save_head",
    "stopping",
    "train_heads",
    "verification",
]


def __getattr__(name: str) -> Any:
    if name in TRAINING:
        return getattr(import_module(TRAINING[name]), name)
    raise AttributeError(f"module 'specheads' has no attribute {name!r}")
