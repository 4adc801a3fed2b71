"""What a pair is and needs, said before anything of it is loaded: its models, the memory of their weights, access on the hub.

Of the models of conf/model on the hub, sizes and licences are known before anything is downloaded.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from specheads.errors import UserError
from specheads.pair.config import PairConfig
from specheads.pair.language_model import short_name, weightless_model
from specheads.pair.quantization import QUANTIZATIONS
from specheads.pair.revisions import EMBEDDED, how_to_access

HALF = 2  # bytes per weight where the type of a checkpoint is not known yet: almost all are stored in 16 bits


@dataclass(frozen=True)
class _PublishedModel:
    """A model on the hub: its number of parameters, its licence, and whether that must be accepted there before a download."""

    num_parameters: int
    licence: str
    gated: bool = False


_LLAMA2, _QWEN, _OPT = "Llama 2 Community License", "Apache-2.0", "OPT licence, for research"
_BLOOM = "BigScience BLOOM RAIL 1.0"
PUBLISHED = {
    "meta-llama/Llama-2-7b-chat-hf": _PublishedModel(6_738_415_616, _LLAMA2, gated=True),
    "meta-llama/Llama-2-13b-chat-hf": _PublishedModel(13_015_864_320, _LLAMA2, gated=True),
    "meta-llama/Llama-2-70b-chat-hf": _PublishedModel(68_976_648_192, _LLAMA2, gated=True),
    "meta-llama/Llama-2-13b-hf": _PublishedModel(13_015_864_320, _LLAMA2, gated=True),
    "meta-llama/Llama-3.2-1B-Instruct": _PublishedModel(1_235_814_400, "Llama 3.2 Community License", gated=True),
    "meta-llama/Llama-3.1-8B-Instruct": _PublishedModel(8_030_261_248, "Llama 3.1 Community License", gated=True),
    "huggyllama/llama-7b": _PublishedModel(6_738_415_616, "LLaMA licence, for research"),
    "JackFram/llama-68m": _PublishedModel(68_030_208, "Apache-2.0"),
    "JackFram/llama-160m": _PublishedModel(162_417_408, "Apache-2.0"),
    "facebook/opt-125m": _PublishedModel(125_239_296, _OPT),
    "facebook/opt-350m": _PublishedModel(331_196_416, _OPT),
    "facebook/opt-13b": _PublishedModel(12_853_473_280, _OPT),
    "bigscience/bloom-560m": _PublishedModel(559_214_592, _BLOOM),
    "bigscience/bloom-7b1": _PublishedModel(7_069_016_064, _BLOOM),
    "EleutherAI/pythia-70m": _PublishedModel(70_426_624, "Apache-2.0"),
    "EleutherAI/pythia-2.8b": _PublishedModel(2_775_208_960, "Apache-2.0"),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _PublishedModel(134_515_008, "Apache-2.0"),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _PublishedModel(1_711_376_384, "Apache-2.0"),
    "Qwen/Qwen3-0.6B": _PublishedModel(596_049_920, "Apache-2.0"),
    "Qwen/Qwen3-8B": _PublishedModel(8_190_735_360, "Apache-2.0"),
    "Qwen/Qwen3-32B": _PublishedModel(32_762_123_264, "Apache-2.0"),
}


@dataclass(frozen=True)
class _ModelNeeds:
    """A model that is to be loaded: its role, where it is, its weights and their bytes, None where these are not known yet."""

    role: str
    location: str
    num_parameters: int | None = None
    num_bytes: float | None = None
    dtype: str | None = None

    @property
    def text(self) -> str:
        """The model in words."""
        if self.num_parameters is None:
            return f"{self.role} {self.location}"
        return f"{self.role} {self.location} ({size_text(self.num_parameters)} parameters)"


def pair_needs(config: PairConfig, only_draft: bool = False) -> list[str]:
    """Return lines about a pair for its user: models, memory, access to gated ones; none for an embedded pair.

    With `only_draft` the target's weights are not loaded. Sizes are those of `PUBLISHED`, or of the configs of the models.
    """
    if str(config.target).startswith(EMBEDDED) or not config.target:
        return []
    target = model_needs("target", config)
    models = [model_needs("draft", config), target] if config.draft else [target]
    lines = [f"pair {config.name or 'without a name'}: {' for '.join(model.text for model in models)}"]
    loaded = [model for model in models if not (only_draft and model is target)]
    if memory := _memory_text(loaded):
        lines.append(memory)
    gated = [model.location for model in models if (known := PUBLISHED.get(model.location)) and known.gated]
    licences = dict.fromkeys(PUBLISHED[location].licence for location in gated)
    if gated:
        lines.append(f"gated ({', '.join(licences)}): {how_to_access(gated)}")
    return lines


def model_needs(role: str, config: PairConfig) -> _ModelNeeds:
    """Return the needs of the draft or the target of a pair; a model whose config cannot be read yet has those of `PUBLISHED`."""
    source = config.source(role)
    known, dtype = PUBLISHED.get(str(source.location)), source.dtype
    num_parameters = known.num_parameters if known else None
    per_weight = dtype.itemsize if isinstance(dtype, torch.dtype) else HALF
    if num_parameters is None or not isinstance(dtype, torch.dtype):
        with suppress(UserError):  # loading it says why, in a moment
            model = weightless_model(source)
            num_parameters, dtype, per_weight = model.num_parameters(), model.dtype, model.dtype.itemsize
    share = QUANTIZATIONS[source.quantization].num_bytes if source.quantization else per_weight
    stored = source.quantization or (short_name(dtype) if isinstance(dtype, torch.dtype) else None)
    return _ModelNeeds(
        role, str(source.location), num_parameters, None if num_parameters is None else num_parameters * share, stored
    )


def size_text(num_parameters: int) -> str:
    """Return a number of parameters with three digits, "6.74 billion"."""
    return f"{num_parameters / 1e9:.3g} billion" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.3g} million"


def memory_text(num_bytes: float) -> str:
    """Return bytes with three digits, "151 GB" or "53.3 MB"."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _memory_text(models: Sequence[_ModelNeeds]) -> str | None:
    """Return what the weights of models take; None where their sizes are not known."""
    sizes = [model.num_bytes for model in models if model.num_bytes is not None]
    if len(sizes) < len(models):
        return None
    types = " and ".join(dict.fromkeys(model.dtype or "the type of the checkpoint" for model in models))
    parts = f" ({' + '.join(map(memory_text, sizes))})" if len(sizes) > 1 else ""
    return (
        f"it needs {memory_text(sum(sizes))} of memory{parts} for weights in {types}, and more for the keys and values of texts"
    )
