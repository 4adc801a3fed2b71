"""What a pair is and needs, said before anything of it is loaded: its models, the memory of their weights, access on the hub."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from specheads.errors import UserError
from specheads.pair.config import ModelSource, PairConfig
from specheads.pair.language_model import short_name, weightless_model
from specheads.pair.quantization import QUANTIZATIONS
from specheads.pair.revisions import EMBEDDED, how_to_access

HALF = 2.0  # bytes per weight where the type of a checkpoint is not known yet: almost all are stored in 16 bits
# Numbers of parameters of the models of conf/model on the hub, known before anything is downloaded.
PUBLISHED = {
    "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-chat-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-chat-hf": 68_976_648_192,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "huggyllama/llama-7b": 6_738_415_616,
    "JackFram/llama-68m": 68_030_208,
    "JackFram/llama-160m": 162_417_408,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-13b": 12_853_473_280,
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom-7b1": 7_069_016_064,
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
}
# By the beginning of a model's id the licence that must be accepted on the hub before a download.
GATED = {f"meta-llama/Llama-{version}": f"Llama {version} Community License" for version in ("2", "3.1", "3.2")}


@dataclass(frozen=True)
class _Weights:
    """The weights of a model that is to be loaded: their number and bytes, None where these are not known yet, and their type."""

    number: int | None
    num_bytes: float | None
    dtype: str


def pair_needs(config: PairConfig, only_draft: bool = False) -> list[str]:
    """Return lines about a pair for its user: models, memory, access to gated ones; none for an embedded pair.

    With `only_draft` the target's weights are not loaded. Sizes are those of `PUBLISHED`, or of the configs of the models.
    """
    if str(config.target).startswith(EMBEDDED) or not config.target:
        return []
    sources = {role: config.source(role) for role in ("draft", "target") if role == "target" or config.draft}
    weights = {role: _weights_of(source) for role, source in sources.items()}
    models = [
        f"{role} {source.location}" + (f" ({size_text(number)} parameters)" if (number := weights[role].number) else "")
        for role, source in sources.items()
    ]
    lines = [f"pair {config.name or 'without a name'}: {' for '.join(models)}"]
    lines += _memory_lines([each for role, each in weights.items() if role == "draft" or not only_draft])
    gated = {str(source.location): name for source in sources.values() for name in GATED if str(source.location).startswith(name)}
    if gated:
        licences = ", ".join(dict.fromkeys(GATED[name] for name in gated.values()))
        lines.append(f"gated ({licences}): {how_to_access([*gated])}")
    return lines


def _weights_of(source: ModelSource) -> _Weights:
    """Return the weights of a model; one whose config cannot be read yet has those of `PUBLISHED`."""
    number, dtype = PUBLISHED.get(str(source.location)), source.dtype
    if number is None or not isinstance(dtype, torch.dtype):
        with suppress(UserError):  # loading it says why, in a moment
            model = weightless_model(source)
            number, dtype = model.num_parameters(), model.dtype
    per_weight, stored = HALF, "the type of the checkpoint"
    if source.quantization:
        per_weight, stored = QUANTIZATIONS[source.quantization].num_bytes, source.quantization
    elif isinstance(dtype, torch.dtype):
        per_weight, stored = dtype.itemsize, short_name(dtype)
    return _Weights(number, None if number is None else number * per_weight, stored)


def size_text(num_parameters: int) -> str:
    """Return a number of parameters with three digits, "6.74 billion"."""
    return f"{num_parameters / 1e9:.3g} billion" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.3g} million"


def memory_text(num_bytes: float) -> str:
    """Return bytes with three digits, "151 GB" or "53.3 MB"."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _memory_lines(weights: Sequence[_Weights]) -> list[str]:
    """Return what weights take; nothing where their sizes are not known."""
    sizes = [each.num_bytes for each in weights if each.num_bytes is not None]
    if len(sizes) < len(weights):
        return []
    types = " and ".join(dict.fromkeys(each.dtype for each in weights))
    parts = f" ({' + '.join(map(memory_text, sizes))})" if len(sizes) > 1 else ""
    return [
        f"it needs {memory_text(sum(sizes))} of memory{parts} for weights in {types}, and more for the keys and values of texts"
    ]
