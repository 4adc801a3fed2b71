"""A head in the format of SpecDec++'s authors, if their network can compute the same; `heads/specdecpp.py` describes it."""

import logging
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import nn

from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead
from specheads.heads.portable.network import ResidualBlock
from specheads.storage.files import write_json, write_whole

FOLDER = "specdecpp"  # in the head's folder, whose files have the same names
logger = logging.getLogger(__name__)


def write_theirs(head: AcceptanceHead, folder: Path) -> Path:
    """Write a head into the folder `specdecpp` of `folder` so that their code loads it; return the path.

    Its calibration is left out.

    Raises:
        UserError: a head that their network cannot compute, with the reason.
    """
    if reason := obstacle(head):
        raise UserError(f"format=specdecpp cannot hold this head: {reason}. Use format=standalone or format=transformers.")
    if head.config.calibration is not None:
        logger.warning("their format has no calibration by index: their decoder reads the head's raw logits")
    size, depth = head.config.hidden_size, head.config.depth
    with torch.no_grad():
        weight, bias = (
            head.readout.weight * head.input_scale,
            head.readout.bias - head.readout.weight @ (head.input_scale * head.input_mean),
        )
        block = {}
        if depth:
            linear = _linears(head)[0]
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


def obstacle(head: AcceptanceHead) -> str | None:
    """Return why their network cannot compute the same as this head, or None."""
    config = head.config
    if config.predicts != "input_token" or config.inputs != ("hidden",) or isinstance(head.projection, nn.Linear):
        inputs = ", ".join(config.inputs)
        return f"it reads {inputs} with predicts={config.predicts}, theirs reads the hidden state of the token it predicts"
    blocks = _linears(head)
    if any(not torch.equal(block.weight, blocks[0].weight) or not torch.equal(block.bias, blocks[0].bias) for block in blocks):
        return (
            f"its {config.depth} blocks have different weights, theirs is one block applied {config.depth} times (use "
            "head.depth=1 at most)"
        )
    if blocks and not torch.equal(head.input_scale, torch.ones_like(head.input_scale)):
        return "it scales its inputs, which theirs does not do and blocks cannot absorb (use head.depth=0)"
    if len(blocks) > 1 and head.input_mean.any():
        return "it shifts its inputs, which only the first of several blocks with equal weights could absorb (use head.depth=1)"
    return None


def _linears(head: AcceptanceHead) -> list[nn.Linear]:
    """Return the linear layers of a head's blocks."""
    return [cast(ResidualBlock, block).linear for block in head.blocks]
