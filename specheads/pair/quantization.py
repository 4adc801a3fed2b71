"""Models whose weights are stored in fewer bits: short names for transformers' quantization configs, and the packages they need.

Only the weights of linear layers are quantized; embeddings and the output embedding keep their type.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specheads.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Imports inside functions: the packages are optional, and they and transformers take seconds to import, also for `--help`.


@dataclass(frozen=True)
class _Quantization:
    """A way to store weights: the package that does it, bytes per weight, and what its config is made of."""

    package: str
    num_bytes: float
    config: str  # the class of torchao's config, or a key of bitsandbytes' that is true
    others: Mapping[str, Any] = field(default_factory=dict)  # more keys of bitsandbytes' config

    def make(self) -> Any:
        """Return transformers' config for it."""
        import transformers

        if self.package == "bitsandbytes":
            return transformers.BitsAndBytesConfig(**{self.config: True, **self.others})
        import torchao.quantization

        return transformers.TorchAoConfig(getattr(torchao.quantization, self.config)())


_NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
QUANTIZATIONS = {
    "int8": _Quantization("torchao", 1, "Int8WeightOnlyConfig"),
    "fp8": _Quantization("torchao", 1, "Float8WeightOnlyConfig"),
    "int4": _Quantization("torchao", 0.5, "Int4WeightOnlyConfig"),
    "nf4": _Quantization("bitsandbytes", 0.5, "load_in_4bit", _NF4),  # Dettmers et al. 2023
    "llm_int8": _Quantization("bitsandbytes", 1, "load_in_8bit"),  # Dettmers et al. 2022
}


def _is_usable(package: str) -> bool:
    """Whether transformers can use a package: it is installed and new enough."""
    from transformers import utils

    return {"torchao": utils.is_torchao_available, "bitsandbytes": utils.is_bitsandbytes_available}[package]()


def check_quantization(key: str, name: str | None) -> None:
    """Raise UserError unless `name`, the value of `key`, is None or a known quantization whose package is installed."""
    if name is None:
        return
    if name not in QUANTIZATIONS:
        raise UserError(f"{key}={name} is not known; expected {', '.join(QUANTIZATIONS)}, or null for the weights as they are.")
    package = QUANTIZATIONS[name].package
    if not _is_usable(package):
        raise UserError(f"{key}={name} needs the package {package}, which is missing or too old: pip install -U {package}")


def quantize(model: "PreTrainedModel", name: str) -> "PreTrainedModel":
    """Return a model that was not read from files, its linear layers quantized in place except the output embedding.

    Raises:
        UserError: a quantization that only works while files are read.
    """
    if QUANTIZATIONS[name].package != "torchao":
        known = ", ".join(other for other, each in QUANTIZATIONS.items() if each.package == "torchao")
        raise UserError(f"quantization={name} does not work for synthetic models; expected {known}.")
    from torchao.quantization import quantize_

    config, output = QUANTIZATIONS[name].make(), model.get_output_embeddings()
    quantize_(model, config.quant_type, lambda module, _: isinstance(module, nn.Linear) and module is not output)
    model.config.quantization_config = config  # as from_pretrained leaves it; names of compiled code depend on it
    return model


def is_quantized(model: "PreTrainedModel") -> bool:
    """Whether a model's weights are quantized."""
    return getattr(model.config, "quantization_config", None) is not None
