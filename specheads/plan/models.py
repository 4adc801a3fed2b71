"""The sizes of a pair's models without their weights: those of published models from a table, of others from their configs."""

from dataclasses import dataclass
from typing import Self

import torch

from specheads.decoding.load.roofline import ModelSize
from specheads.errors import UserError
from specheads.language_model import weightless_model
from specheads.pair_config import PairConfig
from specheads.pair_needs import HALF, model_needs
from specheads.published_models import PUBLISHED
from specheads.quantization import QUANTIZATIONS
from specheads.training.distill.memory import ModelSizes

# Layers, sizes of states and of the network's inner layer, query heads, the numbers of one token's queries and of its keys, and
# tokens; from the config files on the hub. Parameters are those of PUBLISHED.
SHAPES = {
    "meta-llama/Llama-2-7b-chat-hf": (32, 4096, 11_008, 32, 4096, 4096, 32_000),
    "meta-llama/Llama-2-13b-chat-hf": (40, 5120, 13_824, 40, 5120, 5120, 32_000),
    "meta-llama/Llama-2-70b-chat-hf": (80, 8192, 28_672, 64, 8192, 1024, 32_000),
    "meta-llama/Llama-2-13b-hf": (40, 5120, 13_824, 40, 5120, 5120, 32_000),
    "meta-llama/Llama-3.2-1B-Instruct": (16, 2048, 8192, 32, 2048, 512, 128_256),
    "meta-llama/Llama-3.1-8B-Instruct": (32, 4096, 14_336, 32, 4096, 1024, 128_256),
    "huggyllama/llama-7b": (32, 4096, 11_008, 32, 4096, 4096, 32_000),
    "JackFram/llama-68m": (2, 768, 3072, 12, 768, 768, 32_000),
    "JackFram/llama-160m": (12, 768, 3072, 12, 768, 768, 32_000),
    "facebook/opt-125m": (12, 768, 3072, 12, 768, 768, 50_272),
    "facebook/opt-350m": (24, 1024, 4096, 16, 1024, 1024, 50_272),
    "facebook/opt-13b": (40, 5120, 20_480, 40, 5120, 5120, 50_272),
    "bigscience/bloom-560m": (24, 1024, 4096, 16, 1024, 1024, 250_880),
    "bigscience/bloom-7b1": (30, 4096, 16_384, 32, 4096, 4096, 250_880),
    "EleutherAI/pythia-70m": (6, 512, 2048, 8, 512, 512, 50_304),
    "EleutherAI/pythia-2.8b": (32, 2560, 10_240, 32, 2560, 2560, 50_304),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (30, 576, 1536, 9, 576, 192, 49_152),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (24, 2048, 8192, 32, 2048, 2048, 49_152),
    "Qwen/Qwen3-0.6B": (28, 1024, 3072, 16, 2048, 1024, 151_936),
    "Qwen/Qwen3-8B": (36, 4096, 12_288, 32, 4096, 1024, 151_936),
    "Qwen/Qwen3-32B": (64, 5120, 25_600, 64, 8192, 1024, 151_936),
}


@dataclass(frozen=True)
class PlannedModel:
    """A model of a plan: its shape, and its bytes."""

    sizes: ModelSizes
    size: ModelSize

    @classmethod
    def of(cls, role: str, config: PairConfig, quantization: str | None = None) -> Self:
        """Return the draft or the target of a pair, quantized or not.

        Raises:
            UserError: a model that is not in SHAPES and whose config cannot be read here.
        """
        needs, is_draft = model_needs(role, config), role == "draft"
        if needs.location in SHAPES:
            sizes = ModelSizes(PUBLISHED[needs.location].num_parameters, *SHAPES[needs.location])
        else:
            revision = config.draft_revision if is_draft else config.target_revision
            try:
                model = weightless_model(needs.location, revision, config.dtype, "cpu", None, config.trusts(role), quiet=True)
            except UserError as error:
                raise UserError(
                    f"{role}={needs.location}: its layers are not known, and its config cannot be read ({error}). Give a folder "
                    f"with its config.json (hf download {needs.location} config.json), or a pair of published models."
                ) from None
            sizes = ModelSizes.of(model)
        stored = (needs.num_bytes or HALF * sizes.num_weights) / (needs.num_parameters or sizes.num_weights)
        per_weight = QUANTIZATIONS[quantization].num_bytes if quantization else stored
        # Keys and values have the type of the states, which are not quantized.
        element = config.dtype.itemsize if isinstance(config.dtype, torch.dtype) else (4 if config.dtype == "float32" else HALF)
        return cls(sizes, ModelSize(sizes.num_weights, 2 * sizes.num_layers * sizes.key_value_size * element, per_weight))


@dataclass(frozen=True)
class PlannedPair:
    """A pair of a plan."""

    name: str
    draft: PlannedModel
    target: PlannedModel

    @classmethod
    def of(cls, config: PairConfig, quantization: str | None = None) -> Self:
        """Return a pair by its config, with its target quantized or not; no package for that is needed here.

        Raises:
            UserError: models or a quantization that are not known.
        """
        if quantization not in (None, *QUANTIZATIONS):
            raise UserError(f"quantization={quantization} is not known; use one of {', '.join(QUANTIZATIONS)}.")
        if not config.draft or not config.target:
            raise UserError("a plan needs both models: give draft= and target=, or the model= of a pair in conf/model.")
        name = config.name or f"{config.draft} for {config.target}"
        return cls(name, PlannedModel.of("draft", config), PlannedModel.of("target", config, quantization))

    @property
    def weight_bytes(self) -> float:
        """The bytes of both models' weights."""
        return self.draft.size.weight_bytes + self.target.size.weight_bytes
