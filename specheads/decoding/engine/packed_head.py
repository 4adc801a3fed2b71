"""Packed copies of heads' networks, each computed by one operator, as most of the time would go in between their small maps."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_made_of_tensors

from specheads.decoding.engine.operators import pack
from specheads.heads.portable.network import Network, ResidualBlock

DTYPES = (torch.float32, torch.float64)
COMPUTING = ("forward", "score", "assemble")  # the methods of a network that the operator stands for


def has_operator(module: nn.Module) -> bool:
    """Whether the operator computes what this module does."""
    if not isinstance(module, Network) or any(getattr(type(module), name) is not getattr(Network, name) for name in COMPUTING):
        return False
    maps = [*((block, block.linear) for block in module.blocks), (module.projection,), (module.readout,)]
    kinds = {type(part) for parts in maps for part in parts} - {ResidualBlock, nn.Linear, nn.Identity}
    parts = [module, *(each for part in (module.projection, module.blocks, module.readout) for each in part.modules())]
    tensors = [tensor for part in parts for tensor in (*part.parameters(False), *part.buffers(False))]
    return (
        not kinds
        and not any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        and not any(is_made_of_tensors(tensor) for tensor in tensors)  # such as quantized ones
        and len({tensor.dtype for tensor in tensors}) == 1
        and tensors[0].dtype in DTYPES
    )


class PackedNetwork(nn.Module):
    """A network whose maps are packed for the operator."""

    input_mean: Tensor
    input_scale: Tensor
    projection: Tensor | None
    projection_bias: Tensor | None
    blocks: Tensor | None
    block_biases: Tensor | None

    def __init__(self, members: Sequence[Any]) -> None:
        super().__init__()
        (network,) = members
        projected, linears = isinstance(network.projection, nn.Linear), [block.linear for block in network.blocks]
        tensors = {
            "input_mean": network.input_mean,
            "input_scale": network.input_scale,
            "projection": pack(network.projection.weight) if projected else None,
            "projection_bias": network.projection.bias if projected else None,
            "blocks": torch.cat([pack(linear.weight) for linear in linears]) if linears else None,
            "block_biases": torch.stack([linear.bias for linear in linears]) if linears else None,
            "readout": network.readout.weight[0],
            "readout_bias": network.readout.bias,
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, None if tensor is None else tensor.detach().clone().contiguous(), persistent=False)

    def forward_of(self, members: Sequence[Any], number: int) -> Callable[..., Tensor]:
        """Return what computes the network's logits (...) from named features."""
        return partial(self._logits, members[number])  # not kept here: copies go when their network goes

    def _logits(self, network: Network, features: Mapping[str, Tensor]) -> Tensor:
        return torch.ops.specheads.head_network(
            network.assemble(features),
            self.input_mean,
            self.input_scale,
            self.projection,
            self.projection_bias,
            self.blocks,
            self.block_biases,
            self.readout,
            self.readout_bias,
        )
