"""Models whose weights are stored in fewer bits (on a GPU, by packages), or rounded as in GGUF
files (on a CPU).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin

# Imports inside functions: the packages are optional, and they and transformers take seconds to
# import, also for `--help`.


@dataclass(frozen=True)
class _Quantization:
    """A way to store weights: the package that does it, bytes per weight, and what its config is
    made of.
    """

    package: str
    num_bytes: float
    # The class of torchao's config, or the arguments of bitsandbytes'
    config: str | Mapping[str, object]

    def make(self) -> "QuantizationConfigMixin":
        import transformers

        if not isinstance(self.config, str):
            return transformers.BitsAndBytesConfig(**self.config)
        import torchao.quantization

        return transformers.TorchAoConfig(getattr(torchao.quantization, self.config)())


_NF4 = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": torch.bfloat16,
}
FORMS = {"int8": "Q8_0", "int4": "Q4_1"}  # of linear layers on a CPU
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

    return {"torchao": utils.is_torchao_available, "bitsandbytes": utils.is_bitsandbytes_available}[
        package
    ]()


def check_quantization(name: str | None) -> str | None:
    """Return `name`.

    Raises ValueError unless it is possible with what is installed; None always is.
    """
    if name in FORMS and not torch.cuda.is_available():
        return name
    if name == "fp8" and not torch.cuda.is_available():
        raise ValueError("is for GPUs; on a CPU use int8 or int4")
    if name is not None and not _is_usable(package := QUANTIZATIONS[name].package):
        raise ValueError(
            f"needs the package {package}, which is missing or too old (pip install -U {package})"
        )
    return name


def is_quantized(model: "PreTrainedModel") -> bool:
    """Whether a model's weights are quantized."""
    return getattr(model.config, "quantization_config", None) is not None


_GROUP = 32  # neighbouring inputs of an output that share numbers
_CHUNK = 4096  # groups that a processor's cache holds
_LEVELS = {"Q4_1": 15, "Q4_0": 15, "Q8_0": 255}
_ZEROS = {"Q4_0": 8, "Q8_0": 128}


class Lattice(NamedTuple):
    """Weights d q + m in groups of 32 inputs: q (O, I / 32, 32) in bytes, d and m (O, I / 32, 1) in
    float16.
    """

    q: Tensor
    d: Tensor
    m: Tensor

    def weight(self) -> Tensor:
        """Return the weights (O, I) in float32, rounded once."""
        return self.q.float().mul_(self.d.float()).add_(self.m.float()).flatten(-2)


def lattice_of(weight: Tensor, form: str) -> Lattice:
    """Return weights (O, I), I a multiple of 32, rounded as GGUF rounds them in Q4_1, Q4_0 or
    Q8_0.
    """
    groups = weight.float().unflatten(-1, (-1, _GROUP))
    least = groups.amin(dim=-1, keepdim=True)
    most = groups.amax(dim=-1, keepdim=True)
    largest = torch.where(-least > most, least, most)
    step = {"Q4_1": (most - least) / 15, "Q4_0": largest / -8, "Q8_0": largest.abs() / 127}[form]
    step = torch.where(step == 0, 1, step)
    start = -_ZEROS[form] * step if form in _ZEROS else least
    q = (groups - start).mul_(1 / step).round_().clamp_(0, _LEVELS[form]).to(torch.uint8)
    d = step.half()
    return Lattice(q, d, -_ZEROS[form] * d if form in _ZEROS else least.half())


def fits_lattice(weight: Tensor) -> bool:
    """Whether a weight is that of a linear map whose inputs make whole groups."""
    return weight.dim() == 2 and weight.shape[1] % _GROUP == 0


def lattice_from(q: Tensor, d: Tensor) -> Lattice:
    """Return the lattice of Q8_0 of `q` (O, I) uint8 and `d` (O, I / 32) float16."""
    return Lattice(q.unflatten(-1, (-1, _GROUP)), d[..., None], -_ZEROS["Q8_0"] * d[..., None])


def on_lattice(weight: Tensor, *forms: str) -> Lattice | None:
    """Return the float32 weights (O, I) in the first of some forms that gives each of them its
    bits; None if none does.
    """
    if weight.shape[-1] % _GROUP:
        return None
    for form in forms:
        parts: list[Lattice] = []
        for rows in weight.reshape(-1, _GROUP).split(_CHUNK):
            lattice = lattice_of(rows, form)
            if not torch.equal(lattice.weight(), rows):
                break
            parts.append(lattice)
        else:
            tensors = list[Tensor]()
            for each in zip(*parts, strict=True):
                tensors.append(torch.cat(each).view(*weight.shape[:-1], -1, each[0].shape[-1]))
            return Lattice(*tensors)
    return None


@torch.no_grad()
def round_weights(model: "PreTrainedModel", form: str) -> float:
    """Round the linear maps of a model with whole groups, the output embedding to Q8_0, and return
    their share of all weights.
    """
    output = model.get_output_embeddings()
    rounded = 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.in_features % _GROUP == 0:
            rounded += module.weight.numel()
            for rows in module.weight.split(_CHUNK):
                rows.copy_(lattice_of(rows, "Q8_0" if module is output else form).weight())
    return rounded / model.num_parameters()
