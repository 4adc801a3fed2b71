"""specheads: acceptance-prediction heads (SpecDec++) and draft distillation for speculative decoding."""

import importlib
from typing import TYPE_CHECKING, Any

from specheads.decoding import drafting, stopping, verification
from specheads.decoding.baseline import generate_baseline
from specheads.decoding.decoder import SpeculativeDecoder
from specheads.errors import UserError
from specheads.heads.checkpoint import load_head, save_head
from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.pair import Pair, load_pair
from specheads.sampling import Warp

if TYPE_CHECKING:
    from specheads.evaluation.evaluate import evaluate
    from specheads.evaluation.settings import Evaluation
    from specheads.prompts.generated_data import GeneratedData
    from specheads.training.distill.distillation import DistilledDraft, distill
    from specheads.training.distill.settings import Distillation
    from specheads.training.heads.head_training import TrainedHeads, train_heads
    from specheads.training.heads.settings import HeadTraining

__version__ = "0.1.0"

# A decoder does not need these, and they import pydantic, lightning and datasets: each is imported when it is first used.
LAZY = {
    "DistilledDraft": "specheads.training.distill.distillation",
    "Distillation": "specheads.training.distill.settings",
    "Evaluation": "specheads.evaluation.settings",
    "GeneratedData": "specheads.prompts.generated_data",
    "HeadTraining": "specheads.training.heads.settings",
    "TrainedHeads": "specheads.training.heads.head_training",
    "distill": "specheads.training.distill.distillation",
    "evaluate": "specheads.evaluation.evaluate",
    "train_heads": "specheads.training.heads.head_training",
}

__all__ = [
    "AcceptanceHead",
    "Distillation",
    "DistilledDraft",
    "Evaluation",
    "GeneratedData",
    "HeadConfig",
    "HeadTraining",
    "Pair",
    "SpeculativeDecoder",
    "TrainedHeads",
    "UserError",
    "Warp",
    "distill",
    "drafting",
    "evaluate",
    "generate_baseline",
    "load_head",
    "load_pair",
    "save_head",
    "stopping",
    "train_heads",
    "verification",
]


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LAZY[name]), name)
