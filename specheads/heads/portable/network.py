"""The network of a head, in torch alone: exported files carry a copy of this source."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from specheads.features import FEATURES


def assemble(inputs: Sequence[str], features: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the input (..., input_size) of a network from named features, each (..., size) or (...)."""
    columns = []
    for name in inputs:
        feature, value = FEATURES[name], features[name].to(dtype)
        value = value if feature.transform is None else feature.transform(value)
        columns.append(value.unsqueeze(-1) if feature.size is None else value)
    return torch.cat(columns, dim=-1)


def tensor_mismatch(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str | None:
    """Return the first difference between the names and shapes of two sets of tensors, or None."""
    for name in sorted(expected.keys() | given.keys()):
        wanted, actual = (tuple(tensors[name].shape) if name in tensors else "no such tensor" for tensors in (expected, given))
        if wanted != actual:
            return f"tensor {name!r} is {actual}, expected {wanted}"
    return None


class ResidualBlock(nn.Module):
    """`x + SiLU(W x + b)`; the identity at the start of training, as SiLU(0) = 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class Network(nn.Module):
    """Maps features to the logit of the acceptance probability (SpecDec++, section 3.2)."""

    input_mean: Tensor  # (input_size,)
    input_scale: Tensor  # (input_size,)

    def __init__(self, inputs: Sequence[str], input_size: int, width: int, depth: int, projected: bool) -> None:
        """Make a network with random weights.

        Args:
            inputs: names of features, in the order in which they are concatenated.
            input_size: number of values in all features.
            width: of the blocks.
            depth: number of blocks.
            projected: whether a linear layer comes before the blocks.
        """
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

    def deviation(self, inputs: Tensor, logits: Tensor) -> float | None:
        """Return the largest difference from golden logits (N,) of inputs (N, input_size), or None if it is only rounding."""
        difference = (self.score(inputs) - logits).abs().max().item()
        return None if difference < 1e-3 * (1 + logits.abs().max().item()) else difference
