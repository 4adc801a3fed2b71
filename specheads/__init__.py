"""specheads: acceptance-prediction heads (SpecDec++) and draft distillation for speculative
decoding.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specheads.data_gen.run import generate_data
    from specheads.data_gen.settings import DataGeneration
    from specheads.decoding import drafting, stopping, verification
    from specheads.decoding.decoder import BatchError, SpeculativeDecoder, generate_baseline
    from specheads.decoding.records import Generation
    from specheads.errors import UserError
    from specheads.evaluation.evaluate import evaluate
    from specheads.evaluation.prompt_sets import PromptData
    from specheads.evaluation.settings import Evaluation
    from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
    from specheads.pair.pair import Pair, load_pair
    from specheads.pair.sampling import Warp
    from specheads.prompts.prompt import GeneratedData
    from specheads.prompts.sources import DatasetSource, NanoSource
    from specheads.training.distill.distillation import DistilledDraft, distill
    from specheads.training.distill.settings import Distillation
    from specheads.training.heads.head_training import TrainedHeads, train_heads
    from specheads.training.heads.settings import HeadTraining

__version__ = "0.1.0"

AXES = ("drafting", "stopping", "verification")  # modules of specheads.decoding
# Where the other public names are. Each is imported when it is first used, as `import specheads`
# should not take the seconds that transformers, pydantic or lightning take; a decoder needs neither
# of the latter two.
_MODULES = {
    "specheads.data_gen.run": ("generate_data",),
    "specheads.data_gen.settings": ("DataGeneration",),
    "specheads.decoding.decoder": ("BatchError", "SpeculativeDecoder", "generate_baseline"),
    "specheads.decoding.records": ("Generation",),
    "specheads.errors": ("UserError",),
    "specheads.evaluation.evaluate": ("evaluate",),
    "specheads.evaluation.prompt_sets": ("PromptData",),
    "specheads.evaluation.settings": ("Evaluation",),
    "specheads.heads.config": ("HeadConfig",),
    "specheads.heads.head": ("AcceptanceHead", "load_head", "save_head"),
    "specheads.pair.pair": ("Pair", "load_pair"),
    "specheads.pair.sampling": ("Warp",),
    "specheads.prompts.prompt": ("GeneratedData",),
    "specheads.prompts.sources": ("DatasetSource", "NanoSource"),
    "specheads.training.distill.distillation": ("DistilledDraft", "distill"),
    "specheads.training.distill.settings": ("Distillation",),
    "specheads.training.heads.head_training": ("TrainedHeads", "train_heads"),
    "specheads.training.heads.settings": ("HeadTraining",),
}
LAZY = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AcceptanceHead",
    "BatchError",
    "DataGeneration",
    "DatasetSource",
    "Distillation",
    "DistilledDraft",
    "Evaluation",
]
__all__ += [
    "GeneratedData",
    "Generation",
    "HeadConfig",
    "HeadTraining",
    "NanoSource",
    "Pair",
    "PromptData",
    "SpeculativeDecoder",
]
__all__ += [
    "TrainedHeads",
    "UserError",
    "Warp",
    "distill",
    "drafting",
    "evaluate",
    "generate_baseline",
    "generate_data",
]
__all__ += ["load_head", "load_pair", "save_head", "stopping", "train_heads", "verification"]


def __getattr__(name: str) -> Any:
    if name in AXES:
        return importlib.import_module(f"specheads.decoding.{name}")
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
