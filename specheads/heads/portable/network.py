"""The network of a head, in torch alone: exported files carry a copy of this source."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from specheads.heads.features import FEATURES, input_size

Config = Mapping[str, Any]  # the content of a head's config.json
Head = TypeVar("Head", bound=nn.Module)


def assemble(inputs: Sequence[str], features: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the input (..., input_size) of a network from named features, each (..., size) or
    (...).
    """
    columns = []
    for name in inputs:
        feature = FEATURES[name]
        value = features[name].to(dtype)
        value = value if feature.transform is None else feature.transform(value)
        columns.append(value.unsqueeze(-1) if feature.size is None else value)
    return torch.cat(columns, dim=-1)


def load_tensors(make: Callable[[], Head], config: Config, tensors: Mapping[str, Tensor]) -> Head:
    """Return the head that `make` returns for `config`, with these tensors in float32.

    ValueError if they do not fit it.
    """
    if config["depth"] > len(tensors):
        raise ValueError(
            f"there are {len(tensors)} tensors, too few for depth={config['depth']} in config.json"
        )
    with torch.device("meta"):  # what a damaged config asks for may not fit into memory
        head = make()
    check_shapes(tensors, {name: tuple(each.shape) for name, each in head.state_dict().items()})
    head.load_state_dict(
        {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}, assign=True
    )
    return head.requires_grad_(False).eval()


def check_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError for a tensor that is missing, too many or of another shape."""
    for name in sorted(expected.keys() | tensors.keys()):
        actual = tuple(tensors[name].shape) if name in tensors else "no such tensor"
        wanted = expected.get(name, "no such tensor")
        if wanted != actual:
            raise ValueError(f"tensor {name!r} is {actual}, expected {wanted} from config.json")


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

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.inputs = tuple(config["inputs"])
        width = config["width"]
        size = input_size(
            self.inputs,
            {**config, "embedding_size": config.get("embedding_size") or config["hidden_size"]},
        )
        self.register_buffer("input_mean", torch.zeros(size))
        self.register_buffer("input_scale", torch.ones(size))
        projected = config["predicts"] == "next_token" or size != width
        self.projection = nn.Linear(size, width) if projected else nn.Identity()
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(config["depth"]))
        self.readout = nn.Linear(width, 1)

    def assemble(self, features: Mapping[str, Tensor]) -> Tensor:
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

    def check_golden(self, inputs: Tensor, golden: Tensor) -> None:
        """Raise ValueError unless inputs (N, input_size) give the golden logits (N,), up to
        rounding.
        """
        difference = (self.score(inputs) - golden).abs().max().item()
        # Also where it is NaN
        if not difference < 1e-3 * (1 + golden.abs().max().item()):
            raise ValueError(f"outputs differ from the golden vectors by {difference:.3g}")
