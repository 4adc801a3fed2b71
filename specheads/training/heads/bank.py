"""Several heads trained side by side on the same hidden states, and their loss; a single head is a
bank of one.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu, softplus

from specheads.heads.head import AcceptanceHead, set_scale
from specheads.heads.portable.network import Network, assemble
from specheads.training.heads.settings import HeadSpec


class HeadStack(nn.Module):
    """G networks of the same inputs, width and depth as one batched computation.

    Parameters of a name are one tensor (G, ...).
    """

    input_mean: Tensor
    input_scale: Tensor

    def __init__(self, networks: Sequence[Network]) -> None:
        super().__init__()
        first = networks[0]
        self.count = len(networks)
        self.inputs = first.inputs
        self.register_buffer("input_mean", first.get_buffer("input_mean").clone())
        self.register_buffer("input_scale", first.get_buffer("input_scale").clone())
        self.projection = None
        if isinstance(first.projection, nn.Linear):
            self.projection = _Stacked(networks, "projection")
        self.blocks = nn.ModuleList()  # names are those of the networks
        for level in range(len(first.blocks)):
            linear_maps = _Stacked(networks, f"blocks.{level}.linear")
            self.blocks.append(nn.ModuleDict({"linear": linear_maps}))
        self.readout = _Stacked(networks, "readout")

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (G, N), in the order in which the networks were given, of assembled inputs
        (N, input_size).
        """
        x = (inputs - self.input_mean) * self.input_scale
        x = x.expand(self.count, *x.shape) if self.projection is None else self.projection.shared(x)
        for block in self.blocks:
            x = x + silu(cast(nn.ModuleDict, block)["linear"](x))
        return self.readout(x).squeeze(-1)

    def lend(self, networks: Sequence[Network]) -> None:
        """Let networks of the shapes and order of the given ones share this stack's memory, so that
        changes appear in both.
        """
        for place, network in enumerate(networks):
            state = {name: values.detach()[place] for name, values in self.named_parameters()}
            network.load_state_dict(state | dict(self.named_buffers()), assign=True)
            network.requires_grad_(False).train(self.training)

    @torch.no_grad()
    def scale_gradients(self, factors: Tensor) -> None:
        """Multiply each network's gradient by its factor (G,)."""
        for parameter in self.parameters():
            gradient = parameter.grad
            if gradient is not None:
                ones = [1] * (gradient.dim() - 1)
                gradient.mul_(factors.to(gradient.dtype).reshape(-1, *ones))

    @torch.no_grad()
    def clip_gradients(self, largest: float) -> None:
        """Scale each network's gradient down to the norm `largest` if it is longer, as if the
        network were trained alone.
        """
        squares = torch.zeros(self.count, dtype=torch.float64, device=self.input_mean.device)
        for parameter in self.parameters():
            if parameter.grad is not None:
                squares += parameter.grad.flatten(1).double().square().sum(dim=1)
        self.scale_gradients((largest / (squares.sqrt() + 1e-6)).clamp_max(1.0))


class _Stacked(nn.Module):
    """Linear maps of several networks: `weight` (G, O, I) and `bias` (G, O)."""

    def __init__(self, networks: Sequence[Network], name: str) -> None:
        super().__init__()
        maps = [cast(nn.Linear, network.get_submodule(name)) for network in networks]
        self.weight = nn.Parameter(torch.stack([each.weight.detach() for each in maps]))
        self.bias = nn.Parameter(torch.stack([each.bias.detach() for each in maps]))

    def forward(self, x: Tensor) -> Tensor:
        """Return (G, N, O) of inputs (G, N, I)."""
        return torch.baddbmm(self.bias[:, None], x, self.weight.transpose(1, 2))

    def shared(self, x: Tensor) -> Tensor:
        """Return (G, N, O) of inputs (N, I) that all maps share: one product."""
        product = linear(x, self.weight.flatten(0, 1), self.bias.flatten())
        return product.unflatten(1, self.bias.shape).transpose(0, 1)


class HeadBank(nn.Module):
    """Heads of one kind, batched by shape, each of which learns as if alone.

    Tensors (heads, ...) are in the order of `specs`.
    """

    def __init__(self, specs: list[HeadSpec], seed: int) -> None:
        super().__init__()
        self.specs = specs
        heads: list[AcceptanceHead] = []
        groups: dict[tuple, list[int]] = {}  # numbers of the heads that can be stacked
        for number, spec in enumerate(specs):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                head = AcceptanceHead(spec.config)
            heads.append(head)
            shape = (head.inputs, spec.config.width, spec.config.depth)
            groups.setdefault(shape, []).append(number)
        # Each stack with the numbers of its heads.
        self.stacks_and_groups: list[tuple[HeadStack, list[int]]] = []
        for group in groups.values():
            stack = HeadStack([heads[number] for number in group])
            self.stacks_and_groups.append((stack, group))
        self.stacks = nn.ModuleList(stack for stack, _ in self.stacks_and_groups)

    @property
    def predicts(self) -> str:
        return self.specs[0].config.predicts

    @property
    def needs(self) -> frozenset[str]:
        return frozenset[str]().union(*(spec.config.inputs for spec in self.specs))

    @property
    def heads(self) -> dict[str, AcceptanceHead]:
        """The heads by name; they share the bank's memory."""
        heads = []
        for spec in self.specs:
            heads.append(AcceptanceHead(spec.config).requires_grad_(False).train(self.training))
        for stack, group in self.stacks_and_groups:
            stack.lend([heads[number] for number in group])
        return {spec.name: head for spec, head in zip(self.specs, heads, strict=True)}

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return logits (heads, N)."""
        rows: dict[int, Tensor] = {}
        for stack, group in self.stacks_and_groups:
            rows |= zip(group, stack(self._assembled(stack, features)), strict=True)
        return torch.stack([rows[number] for number in range(len(rows))])

    def standardise(self, features: Mapping[str, Tensor]) -> None:
        for stack, _ in self.stacks_and_groups:
            set_scale(stack, self._assembled(stack, features))

    def scale_gradients(self, factors: Tensor) -> None:
        for stack, group in self.stacks_and_groups:
            stack.scale_gradients(factors[group])

    def clip_gradients(self, largest: float) -> None:
        for stack, _ in self.stacks_and_groups:
            stack.clip_gradients(largest)

    def _assembled(self, stack: HeadStack, features: Mapping[str, Tensor]) -> Tensor:
        return assemble(stack.inputs, features, stack.readout.weight.dtype)

    def losses(self, logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums of losses and sums of weights, (heads,) both, for logits (heads, N) and
        acceptance probabilities (N,).
        """
        sums = []
        weights = []
        for row, spec in zip(logits, self.specs, strict=True):
            total, weight = weighted_bce(row, label, spec.reject_weight)
            sums.append(total)
            weights.append(weight)
        return torch.stack(sums), torch.stack(weights)


def weighted_bce(
    logits: Tensor, labels: Tensor, reject_weight: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the sum of losses and the sum of weights over positions; their ratio is the loss.

    Weighted binary cross-entropy with soft labels (SpecDec++, section 3.3). A batch that is spread
    over devices is divided by its global sum of weights.

    Args:
        logits: (N,) of the acceptance probability.
        labels: (N,) acceptance probabilities in [0, 1].
    """
    reject = reject_weight * (1 - labels)
    losses = labels * softplus(-logits) + reject * softplus(logits)
    return losses.sum(), (labels + reject).sum()


def constant_loss(labels: Tensor, reject_weight: float) -> float:
    """Return the smallest loss on acceptance probabilities (N,) of a prediction that is the same
    everywhere.
    """
    accepted = labels.mean()
    best = torch.logit(accepted / (accepted + reject_weight * (1 - accepted)))
    total, weight = weighted_bce(best.expand(len(labels)), labels, reject_weight)
    return (total / weight).item()
