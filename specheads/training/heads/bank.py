"""Several heads trained side by side on the same hidden states; a single head is a bank of one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from specheads.heads.head import AcceptanceHead, HeadConfig, set_scale
from specheads.heads.portable.network import Network, assemble
from specheads.training.heads.head_loss import weighted_bce


@dataclass(frozen=True)
class HeadSpec:
    """One head of a bank: its config and the weight of rejections in its loss."""

    name: str
    config: HeadConfig
    reject_weight: float = 1.0


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
        self.projection = (
            _Stacked(networks, "projection") if isinstance(first.projection, nn.Linear) else None
        )
        stacked = [
            _Stacked(networks, f"blocks.{level}.linear") for level in range(len(first.blocks))
        ]
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"linear": block}) for block in stacked
        )  # names are those of the networks
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
            if parameter.grad is not None:
                parameter.grad.mul_(
                    factors.to(parameter.grad.dtype).reshape(-1, *[1] * (parameter.grad.dim() - 1))
                )

    @torch.no_grad()
    def clip_gradients(self, largest: float) -> None:
        """Scale each network's gradient down to the norm `largest` if it is longer, as if the
        network were trained alone.
        """
        gradients = [
            parameter.grad for parameter in self.parameters() if parameter.grad is not None
        ]
        squares = sum(gradient.flatten(1).double().square().sum(dim=1) for gradient in gradients)
        self.scale_gradients((largest / (torch.as_tensor(squares).sqrt() + 1e-6)).clamp_max(1.0))


class _Stacked(nn.Module):
    def __init__(self, networks: Sequence[Network], name: str) -> None:
        super().__init__()
        maps = [cast(nn.Linear, network.get_submodule(name)) for network in networks]
        self.weight = nn.Parameter(
            torch.stack([linear_map.weight.detach() for linear_map in maps])
        )  # (G, O, I)
        self.bias = nn.Parameter(
            torch.stack([linear_map.bias.detach() for linear_map in maps])
        )  # (G, O)

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
                heads.append(AcceptanceHead(spec.config))
            groups.setdefault((heads[-1].inputs, spec.config.width, spec.config.depth), []).append(
                number
            )
        # Each stack with the numbers of its heads.
        self.stacks_and_groups = [
            (HeadStack([heads[number] for number in group]), group) for group in groups.values()
        ]
        self.stacks = nn.ModuleList(stack for stack, _ in self.stacks_and_groups)

    @property
    def predicts(self) -> str:
        return self.specs[0].config.predicts

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(name for spec in self.specs for name in spec.config.inputs)

    @property
    def heads(self) -> dict[str, AcceptanceHead]:
        """The heads by name; they share the bank's memory."""
        heads = [
            AcceptanceHead(spec.config).requires_grad_(False).train(self.training)
            for spec in self.specs
        ]
        for stack, group in self.stacks_and_groups:
            stack.lend([heads[number] for number in group])
        return {spec.name: head for spec, head in zip(self.specs, heads, strict=True)}

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return logits (heads, N)."""
        logits = torch.cat(
            [stack(self._assembled(stack, features)) for stack, _ in self.stacks_and_groups]
        )
        numbers = torch.tensor(
            [number for _, group in self.stacks_and_groups for number in group],
            device=logits.device,
        )
        return logits[numbers.argsort()]

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
        rows = zip(logits, self.specs, strict=True)
        sums, weights = zip(
            *(weighted_bce(row, label, spec.reject_weight) for row, spec in rows), strict=True
        )
        return torch.stack(sums), torch.stack(weights)
