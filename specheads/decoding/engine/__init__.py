"""How a model is run: one interface, and engines from plain PyTorch to captured graphs.

`auto` is the fastest one that this machine and model allow; a warning says why if that is plain
PyTorch.
"""

import logging
from collections.abc import Sequence

from specheads.decoding.engine.artefacts import compile_ahead
from specheads.decoding.engine.compiled import CompiledEngine
from specheads.decoding.engine.cpu import CpuEngine, bulk_operations, packed_reader
from specheads.decoding.engine.cpu.packed import bytes_to_pack
from specheads.decoding.engine.cuda_graph import GraphEngine
from specheads.decoding.engine.eager import EagerEngine, Engine, Engines, ForwardOutput, StepMemory
from specheads.decoding.engine.own_cache import OwnCacheEngine, WholeTexts, cache_of
from specheads.decoding.engine.reading import RowPlaces, TreeSlots
from specheads.decoding.engine_names import resolve_engine
from specheads.errors import UserError
from specheads.pair.language_model import LanguageModel, has_adapters

__all__ = [
    "CompiledEngine",
    "EagerEngine",
    "Engine",
    "Engines",
    "ForwardOutput",
    "RowPlaces",
    "StepMemory",
    "TreeSlots",
    "WholeTexts",
    "bulk_operations",
    "bytes_to_pack",
    "cache_of",
    "compile_ahead",
    "make_engine",
    "packed_reader",
    "resolve_engine",
]

logger = logging.getLogger(__name__)


def make_engine(
    name: str,
    lm: LanguageModel,
    capacity: int,
    spare_capacity: int = 0,
    num_rows: int = 1,
    layers: Sequence[int] = (),
) -> Engine:
    """Return the engine called `name` for one model.

    Args:
        capacity: positions of a text that its memory holds.
        spare_capacity: positions after it, for trees.
        num_rows: texts that its memory holds.
        layers: layers of the model whose inputs each ForwardOutput has, for a draft that reads
            them.

    Raises UserError for an unknown name, an engine that cannot run this model here, or a model that
    none can.
    """
    if lm.device.type == "meta":
        raise UserError(
            f"{lm.name} is on the device meta, where tensors have no numbers; load it again, for"
            " example on cpu."
        )
    name = resolve_engine(name)
    cache = cache_of(lm)
    model = type(lm.model).__name__
    if cache.obstacle is not None:  # to static memory
        if name not in ("auto", "eager"):
            raise UserError(
                f"engine={name} cannot run {model}: {cache.obstacle}. Use engine=eager."
            )
        if spare_capacity:
            raise UserError(
                f"{model} decodes no trees: {cache.obstacle}. Use drafting=autoregressive."
            )
        if name == "auto":
            speed = (
                ""
                if cache.together
                else ", and reads tokens one by one, so that drafts save no time"
            )
            logger.warning(
                "%s runs eagerly on its own cache, one text at a time%s: %s",
                model,
                speed,
                cache.obstacle,
            )
        return OwnCacheEngine(lm, capacity, num_rows, cache.together, layers)
    memory = (lm, capacity, spare_capacity, num_rows, layers)
    if name == "eager":
        return EagerEngine(*memory)
    if name == "cuda_graph" and lm.device.type == "cpu":
        logger.warning(
            "engine=cuda_graph without CUDA only imitates graphs; use engine=compiled for speed."
        )
        return GraphEngine(*memory)
    obstacle = _obstacle_to_compiling(lm)
    if name == "auto" and obstacle:
        logger.warning("%s runs eagerly: %s", model, obstacle)
        return EagerEngine(*memory)
    if obstacle:
        raise UserError(f"engine={name} cannot run {model}: {obstacle}. Use engine=eager.")
    kind = CpuEngine if lm.device.type == "cpu" else CompiledEngine
    if name == "cuda_graph" or (name == "auto" and lm.device.type == "cuda"):
        kind = GraphEngine
    return kind(*memory, strict=name != "auto")


def _obstacle_to_compiling(lm: LanguageModel) -> str | None:
    """Return why this model's forward passes can be neither compiled nor captured here, or None."""
    devices = {str(weight.device) for weight in lm.model.parameters()}
    if len(devices) > 1:
        return f"it is spread over {', '.join(sorted(devices))}"
    attention = lm.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return (
            f"its attention is {attention}, which accepts no mask for static memory; load it with"
            " sdpa"
        )
    if has_adapters(lm.model):
        return "it has adapters, which may be switched at any time; merge them"
    if lm.device.type == "cuda":
        return None
    if lm.device.type != "cpu":
        return f"no faster engine supports {lm.device.type}"
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes seconds to import
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found; install g++ or name one in the environment variable CXX"
    return None
