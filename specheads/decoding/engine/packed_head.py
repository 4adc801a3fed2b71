"""Packed copies of heads' networks, each computed by one operator, as most of the time would go in between their small maps."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specheads.decoding.engine.operators import pack
from specheads.heads.portable.network import Network

DTYPES = (torch.float32, torch.float64)


def has_operator(module: nn.Module) -> bool:
    """Whether the operator computes what this module does."""
    if not isinstance(module, Network):
        return False
    tensors = [*module.projection.parameters(), *module.blocks.parameters(), *module.readout.parameters(), *module.buffers(False)]
    return len({tensor.dtype for tensor in tensors}) == 1 and tensors[0].dtype in DTYPES


class PackedNetwork(nn.Module):
    """A network whose maps are packed for the operator."""

    projection: Tensor | None
    projection_bias: Tensor | None
    blocks: Tensor | None
    block_biases: Tensor | None

    def __init__(self, members: Sequence[Any]) -> None:
        super().__init__()
        (network,) = members
        projected, linears = isinstance(network.projection, nn.Linear), [block.linear for block in network.blocks]
        tensors = {
            "projection": pack(network.projection.weight) if projected else None,
            "projection_bias": network.projection.bias if projected else None,
            "blocks": torch.cat([pack(linear.weight) for linear in linears]) if linears else None,
            "block_biases": torch.stack([linear.bias for linear in linears]) if linears else None,
            "readout": network.readout.weight[0],
            "readout_bias": network.readout.bias,
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, None if tensor is None else tensor.detach().clone(), persistent=False)

    def forward_of(self, members: Sequence[Any], number: int) -> Callable[..., Tensor]:
        """Return what computes the network's logits (...) from named features."""
        return partial(self._logits, members[number])  # not kept here: copies go when their network goes

    def _logits(self, network: Network, features: Mapping[str, Tensor]) -> Tensor:
        return torch.ops.specheads.head_network(
            network.assemble(features),
            network.input_mean,
            network.input_scale,
            self.projection,
            self.projection_bias,
            self.blocks,
            self.block_biases,
            self.readout,
            self.readout_bias,
        )
