"""specheads: acceptance-prediction heads (SpecDec++) and draft distillation for speculative
decoding.
"""

import ast
from importlib import import_module
from inspect import getsource
from sys import modules
from typing import TYPE_CHECKING

# The public names. Each is imported when it is first used, as `import specheads` should not take
# the seconds of transformers, pydantic or lightning; a decoder needs neither of the latter two.
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


def _places() -> dict[str, str]:
    """Return the modules of the public names, as the imports for type checkers above say."""
    found = {}
    for block in ast.parse(getsource(modules[__name__])).body:
        for node in block.body if isinstance(block, ast.If) else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found[alias.name] = node.module
    return found


_PLACES = _places()
__all__ = list(_PLACES)


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _PLACES[name]
    module = import_module(place)
    return getattr(module, name) if hasattr(module, name) else import_module(f"{place}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
