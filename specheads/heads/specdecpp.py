"""Heads in the format of SpecDec++'s authors: read exactly, and written where their network can be ours.

Theirs is a `Sequential` of blocks `x + SiLU(W x + b)`, one block applied `num_layers` times, and a linear layer to two logits: 0 rejects, 1 accepts.
Their softmax is our sigmoid of the difference. They have no scaling of inputs and no calibration, and judge the token that the draft has read.

Source: github.com/Kaffaljidhmah2/SpecDec_pp, specdec_pp/wrap_model.py and train.py; Huang et al. 2024.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.storage.files import write_json, write_whole

FOLDER = "specdecpp"  # in a head's own folder, whose files have the same names
log = logging.getLogger(__name__)


def is_theirs(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is one of theirs."""
    return "hidden_size" in config and not {"format_version", "inputs", "model_type", "architectures"} & config.keys()


def head_from(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: object) -> AcceptanceHead:
    """Return the head of one of their checkpoints, in float32.

    A block that the file holds once, as tensors that share memory are stored, stands for all `num_layers` of them.

    Raises:
        UserError: a tensor that is missing, too many or of another shape.
    """
    size, depth = config["hidden_size"], config.get("num_layers", 0)
    head = AcceptanceHead(HeadConfig(hidden_size=size, depth=depth, predicts="input_token", width=size))
    shapes = {"linear.weight": (size, size), "linear.bias": (size,)}
    expected = {f"model.{place}.{part}": shape for place in range(depth) for part, shape in shapes.items()}
    expected |= {f"model.{depth}.weight": (2, size), f"model.{depth}.bias": (2,)}
    stored = [place for place in range(depth) if f"model.{place}.linear.weight" in tensors] or [0]
    needed = {name for name in expected if int(name.split(".")[1]) in {*stored, depth}} if len(stored) == 1 else expected.keys()
    for name in sorted(needed | tensors.keys()):
        ours, theirs = expected.get(name, "no such tensor"), tuple(tensors[name].shape) if name in tensors else "no such tensor"
        if ours != theirs:
            raise UserError(
                f"{where}/model.safetensors: tensor {name!r} is {theirs}, expected {ours} of a SpecDec++ head with hidden_size={size} and "
                f"num_layers={depth}; save it again."
            )
    places = stored * depth if len(stored) == 1 else range(depth)
    with torch.no_grad():
        for block, place in zip(head.blocks, places, strict=False):
            for part in shapes:
                block.get_parameter(part).copy_(tensors[f"model.{place}.{part}"])
        for part in ("weight", "bias"):
            reject, accept = tensors[f"model.{depth}.{part}"].float()
            head.readout.get_parameter(part).copy_(accept - reject)
    return head.requires_grad_(False).eval()


def write_theirs(head: AcceptanceHead, folder: Path) -> Path:
    """Write a head into the folder `specdecpp` of `folder` so that their code loads it; return its path. Its raw logits go, its calibration stays.

    Raises:
        UserError: a head that their network cannot be, with the reason.
    """
    if reason := why_not(head):
        raise UserError(f"format=specdecpp cannot hold this head: {reason}. Use format=standalone or format=transformers.")
    if head.config.calibration is not None:
        log.warning("their format has no calibration by index: their decoder reads the head's raw logits")
    size, depth = head.config.hidden_size, head.config.depth
    with torch.no_grad():
        weight, bias = (
            head.readout.weight * head.input_scale,
            head.readout.bias - head.readout.weight @ (head.input_scale * head.input_mean),
        )
        block = {}
        if depth:
            linear = head.blocks[0].linear
            block = {"weight": linear.weight, "bias": linear.bias - linear.weight @ head.input_mean}
        tensors = {f"model.{place}.linear.{part}": value.clone() for place in range(depth) for part, value in block.items()}
        # Rejection has logit 0, so that the softmax of both is the sigmoid of one.
        tensors |= {f"model.{depth}.weight": torch.cat([torch.zeros_like(weight), weight])}
        tensors |= {f"model.{depth}.bias": torch.cat([torch.zeros_like(bias), bias])}
    theirs = folder / FOLDER
    theirs.mkdir(exist_ok=True)
    write_whole(theirs / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    write_json(theirs / "config.json", {"hidden_size": size, "num_layers": depth})
    return theirs


def why_not(head: AcceptanceHead) -> str | None:
    """Return why their network cannot be this head, or None."""
    config = head.config
    if config.predicts != "input_token" or config.inputs != ("hidden",) or config.projected:
        return f"it reads {', '.join(config.inputs)} with predicts={config.predicts}, theirs reads the hidden state of the token it judges"
    blocks = [block.linear for block in head.blocks]
    if any(not torch.equal(one.weight, blocks[0].weight) or not torch.equal(one.bias, blocks[0].bias) for one in blocks):
        return f"its {config.depth} blocks have weights of their own, theirs is one block applied {config.depth} times (use head.depth=1 at most)"
    if blocks and not torch.equal(head.input_scale, torch.ones_like(head.input_scale)):
        return "it scales its inputs, which theirs does not and blocks cannot take in (use head.depth=0)"
    if len(blocks) > 1 and head.input_mean.any():
        return "it shifts its inputs, which only the first of several blocks that are one could take in (use head.depth=1)"
    return None
