"""Models whose weights are stored in fewer bits: short names for transformers' quantization configs, and the packages they need.

Only the weights of linear layers are quantized; embeddings and the output embedding keep their type.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Imports inside functions: the packages are optional, and they and transformers take seconds to import, also for `--help`.


@dataclass(frozen=True)
class _Quantization:
    """A way to store weights: the package that does it, bytes per weight, and what its config is made of."""

    package: str
    num_bytes: float
    config: str | Mapping[str, Any]  # the class of torchao's config, or the arguments of bitsandbytes'

    def make(self) -> Any:
        """Return transformers' config for it."""
        import transformers

        if not isinstance(self.config, str):
            return transformers.BitsAndBytesConfig(**self.config)
        import torchao.quantization

        return transformers.TorchAoConfig(getattr(torchao.quantization, self.config)())


_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
QUANTIZATIONS = {
    "int8": _Quantization("torchao", 1, "Int8WeightOnlyConfig"),
    "fp8": _Quantization("torchao", 1, "Float8WeightOnlyConfig"),
    "int4": _Quantization("torchao", 0.5, "Int4WeightOnlyConfig"),
    "nf4": _Quantization("bitsandbytes", 0.5, _NF4),  # Dettmers et al. 2023
    "llm_int8": _Quantization("bitsandbytes", 1, {"load_in_8bit": True}),  # Dettmers et al. 2022
}


def _is_usable(package: str) -> bool:
    """Whether transformers can use a package: it is installed and new enough."""
    from transformers import utils

    return {"torchao": utils.is_torchao_available, "bitsandbytes": utils.is_bitsandbytes_available}[package]()


def check_quantization(name: Any) -> Any:
    """Return `name`. Raises ValueError unless it is None or a known quantization whose package is installed."""
    if name not in [None, *QUANTIZATIONS]:
        raise ValueError(f"is not known; expected {', '.join(QUANTIZATIONS)}, or null for the weights as they are")
    if name is not None and not _is_usable(package := QUANTIZATIONS[name].package):
        raise ValueError(f"needs the package {package}, which is missing or too old (pip install -U {package})")
    return name


def is_quantized(model: "PreTrainedModel") -> bool:
    """Whether a model's weights are quantized."""
    return getattr(model.config, "quantization_config", None) is not None
