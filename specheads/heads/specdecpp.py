"""Checkpoints of SpecDec++'s authors, read exactly.

Their network is a `Sequential` of blocks `x + SiLU(W x + b)`, one block applied `num_layers` times, and a linear layer with two
logits: 0 rejects, 1 accepts. Their softmax is the sigmoid of the difference. They do not scale inputs, have no calibration, and
predict the acceptance of the token that the draft has just read.

Source: github.com/Kaffaljidhmah2/SpecDec_pp, specdec_pp/wrap_model.py and train.py; Huang et al. 2024.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specheads.errors import UserError
from specheads.heads.config import HeadConfig


def is_theirs(config: Mapping[str, Any]) -> bool:
    """Whether the content of a `config.json` belongs to one of their checkpoints."""
    return "hidden_size" in config and not {"format_version", "inputs", "model_type", "architectures"} & config.keys()


def converted(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: object) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Return config and float32 tensors of the head that computes the same as one of their checkpoints.

    Where the file holds a single block, as tensors that share memory are stored, that block is used `num_layers` times.

    Raises:
        UserError: a tensor that is missing, too many or of another shape.
    """
    size, depth = config["hidden_size"], config.get("num_layers", 0)
    ours = HeadConfig(hidden_size=size, depth=depth, predicts="input_token", width=size)
    shapes = {"linear.weight": (size, size), "linear.bias": (size,)}
    expected = {f"model.{place}.{part}": shape for place in range(depth) for part, shape in shapes.items()}
    expected |= {f"model.{depth}.weight": (2, size), f"model.{depth}.bias": (2,)}
    stored = [place for place in range(depth) if f"model.{place}.linear.weight" in tensors] or [0]
    needed = {name for name in expected if int(name.split(".")[1]) in {*stored, depth}} if len(stored) == 1 else expected.keys()
    for name in sorted(needed | tensors.keys()):
        wanted, actual = expected.get(name, "no such tensor"), tuple(tensors[name].shape) if name in tensors else "no such tensor"
        if wanted != actual:
            raise UserError(
                f"{where}/model.safetensors: tensor {name!r} is {actual}, expected {wanted} of a SpecDec++ head with "
                f"hidden_size={size} and num_layers={depth}; save it again."
            )
    places = stored * depth if len(stored) == 1 else range(depth)
    blocks = {f"blocks.{block}.{part}": tensors[f"model.{place}.{part}"] for block, place in enumerate(places) for part in shapes}
    reject, accept = zip(*(tensors[f"model.{depth}.{part}"].float() for part in ("weight", "bias")), strict=True)
    weight, bias = (yes - no for yes, no in zip(accept, reject, strict=True))
    return ours, {
        "input_mean": torch.zeros(size),
        "input_scale": torch.ones(size),
        **{name: tensor.float() for name, tensor in blocks.items()},
        "readout.weight": weight[None],
        "readout.bias": bias[None],
    }
