"""What a head computes, in torch alone: a standalone export is made of this source."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def assemble(inputs: Sequence[str], features: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return what a network reads (..., input_size) of named features, each (..., size) or (...)."""
    columns = []
    for name in inputs:
        value = features[name].to(dtype)
        if name == "draft_prob":
            value = value.clamp_min(1e-12).log()
        elif name == "index":
            value = value.log1p()
        columns.append(value if name in ("hidden", "embedding", "target_hidden") else value.unsqueeze(-1))
    return torch.cat(columns, dim=-1)


class ResidualBlock(nn.Module):
    """`x + SiLU(W x + b)`, the identity plus SiLU(0) = 0 at the start of training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class Network(nn.Module):
    """Features -> logit of the acceptance probability (SpecDec++, section 3.2)."""

    def __init__(self, inputs: Sequence[str], input_size: int, width: int, depth: int, projected: bool) -> None:
        """`inputs` are names of features, `input_size` numbers in all; without `projected` they enter the blocks as they are."""
        super().__init__()
        self.inputs = tuple(inputs)
        self.register_buffer("input_mean", torch.zeros(input_size))
        self.register_buffer("input_scale", torch.ones(input_size))
        self.projection = nn.Linear(input_size, width) if projected else nn.Identity()
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.readout = nn.Linear(width, 1)

    def assemble(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return the network's input (..., input_size) from named features, each (..., size) or (...)."""
        return assemble(self.inputs, features, self.readout.weight.dtype)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return logits (...) for the features named in `inputs`."""
        return self.score(self.assemble(features))

    def score(self, inputs: Tensor) -> Tensor:
        """Return logits (...) of assembled inputs (..., input_size)."""
        x = self.projection((inputs - self.input_mean) * self.input_scale)
        for block in self.blocks:
            x = block(x)
        return self.readout(x).squeeze(-1)
