"""The network of a head, in torch alone: exported files carry a copy of this source."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from specheads.heads.features import FEATURES, before_sampling, columns_of, input_size

Head = TypeVar("Head", bound=nn.Module)


def assemble(inputs: Sequence[str], features: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the input (..., input_size) of a network from named features, each (..., size) or (...)."""
    columns = []
    for name in inputs:
        feature, value = FEATURES[name], features[name].to(dtype)
        value = value if feature.transform is None else feature.transform(value)
        columns.append(value.unsqueeze(-1) if feature.size is None else value)
    return torch.cat(columns, dim=-1)


def load_tensors(make: Callable[[], Head], config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Head:
    """Return the head that `make` returns for `config`, with these tensors in float32, for inference.

    It is made without memory first: what a damaged config asks for may not fit.

    Raises:
        ValueError: a tensor that is missing, extra or of another shape than the config says.
    """
    if config["depth"] > len(tensors):
        raise ValueError(f"there are {len(tensors)} tensors, too few for depth={config['depth']} in config.json")
    with torch.device("meta"):
        head = make()
    shapes = [{name: tuple(tensor.shape) for name, tensor in each.items()} for each in (head.state_dict(), tensors)]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        wanted, actual = (each.get(name, "no such tensor") for each in shapes)
        if wanted != actual:
            raise ValueError(f"tensor {name!r} is {actual}, expected {wanted} from config.json")
    head.load_state_dict({name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}, assign=True)
    return head.requires_grad_(False).eval()


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


class HeadNetwork(Network):
    """The networks of a head: of the acceptance of a drafted token, and where its config asks for it of the expected acceptance.

    The second one, `overlap`, reads only what is known before the token is sampled, so that a decoder may decide by it whether
    to draft the token. It predicts the mean of `min(1, t/d)` over the tokens that the draft may sample,
    `sum_x min(t(x), d(x))`. The networks share no weights: each predicts the same with and without the other.
    """

    # On nano's dev tokens a separate network has a cross-entropy of 0.564, layers shared with the first one 0.565 to 0.572, a
    # linear map 0.575, a constant 0.664 and the overlap itself 0.503.

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Make networks with random weights from the keys of a head's config.json."""
        sizes = {**config, "embedding_size": config.get("embedding_size") or config["hidden_size"]}
        names, width, depth = tuple(config["inputs"]), config["width"], config["depth"]
        size = input_size(names, sizes)
        super().__init__(names, size, width, depth, config["predicts"] == "next_token" or size != width)
        self.overlap: Network | None = None
        if config.get("overlap"):
            known = before_sampling(names)
            self.overlap = Network(known, input_size(known, sizes), width, depth, projected=True)
            self.overlap_columns = columns_of(known, names, sizes)

    def overlap_logit(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return logits (...) of the expected acceptance; features of the sampled token are not read and may be missing.

        Raises:
            ValueError: a head without this read-out.
        """
        return self._overlap()(features)

    def overlap_score(self, inputs: Tensor) -> Tensor:
        """Return the same logits (...) of assembled inputs (..., input_size) of the head; raises the same error."""
        return self._overlap().score(inputs[..., self.overlap_columns])

    def _overlap(self) -> Network:
        if self.overlap is None:
            raise ValueError("this head does not predict the expected acceptance (overlap: false in its config.json)")
        return self.overlap

    def deviation(self, inputs: Tensor, golden: Mapping[str, Tensor]) -> float | None:
        """Return the largest difference from golden logits (N,) of inputs (N, input_size), or None if it is only rounding.

        `golden` has `logits` and, of a head with the read-out `overlap`, `overlap_logits`.
        """
        computed = {"logits": self.score(inputs)} | ({"overlap_logits": self.overlap_score(inputs)} if self.overlap else {})
        worst = None
        for name, logits in computed.items():
            difference = (logits - golden[name]).abs().max().item()
            if not difference < 1e-3 * (1 + golden[name].abs().max().item()):  # also where it is NaN
                worst = max(difference, worst or 0.0)
        return worst
