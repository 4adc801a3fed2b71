"""Several heads trained side by side on the same hidden states; a single head is a bank of one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.heads.portable.network import Network, assemble
from specheads.training.heads.head_loss import weighted_bce
from specheads.training.heads.stack import HeadStack, tie_blocks


@dataclass(frozen=True)
class HeadSpec:
    """One head of a bank: its config and the weights of its loss."""

    name: str
    config: HeadConfig
    accept_weight: float = 1.0
    reject_weight: float = 1.0
    survival_weighted: bool = False
    tied_blocks: bool = False  # one block, applied as often as the head is deep, which begins at random


@dataclass(frozen=True)
class ReadOut:
    """One network of a head and what it learns: the acceptance of drafted tokens, or with `overlap` their expected acceptance."""

    spec: HeadSpec
    overlap: bool = False

    @property
    def name(self) -> str:
        """The beginning of the names of its losses and metrics."""
        return f"{self.spec.name}/overlap_" if self.overlap else f"{self.spec.name}/"

    def network(self, head: AcceptanceHead) -> Network:
        """Return the network of the head."""
        return cast(Network, head.overlap) if self.overlap else head

    def label(self, labels: Mapping[str, Tensor]) -> Tensor:
        """Return what it learns (N,), from labels by name.

        Where the overlap is not known, the acceptance probability of the drafted token is learned in its place: its mean over
        tokens is the overlap.
        """
        label = labels[self.spec.config.label]
        return torch.where(labels["overlap"].isnan(), label, labels["overlap"]) if self.overlap else label


class HeadBank(nn.Module):
    """Heads of one kind (`predicts`) that read the same features, in as few batched computations as their shapes allow.

    Each is initialised from the same seed and learns as if it were trained alone. The `read_outs` are those of all heads, the
    acceptance of every head first; tensors (read-outs, ...) are in this order.
    """

    def __init__(self, specs: list[HeadSpec], seed: int) -> None:
        super().__init__()
        self.specs = specs
        heads = []
        for spec in specs:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                head = AcceptanceHead(spec.config)
                for network in (head, head.overlap) if spec.tied_blocks else ():
                    if network is not None:
                        tie_blocks(network)
            heads.append(head)
        self.read_outs = [ReadOut(spec) for spec in specs] + [
            ReadOut(spec, overlap=True) for spec in specs if spec.config.overlap
        ]
        networks = self._networks(dict(zip((spec.name for spec in specs), heads, strict=True)))
        self.groups: dict[tuple, list[int]] = {}  # numbers of the read-outs whose networks can be stacked
        for number, (network, read_out) in enumerate(zip(networks, self.read_outs, strict=True)):
            shape = network.inputs, read_out.spec.config.width, read_out.spec.tied_blocks
            self.groups.setdefault(shape, []).append(number)
        self.stacks = nn.ModuleList(
            HeadStack([networks[number] for number in group], tied) for (*_, tied), group in self.groups.items()
        )

    def _networks(self, heads: Mapping[str, AcceptanceHead]) -> list[Network]:
        """Return the network of every read-out."""
        return [read_out.network(heads[read_out.spec.name]) for read_out in self.read_outs]

    @property
    def stacks_and_groups(self) -> list[tuple[HeadStack, list[int]]]:
        """Each stack with the numbers of its read-outs."""
        return list(zip(cast(list[HeadStack], list(self.stacks)), self.groups.values(), strict=True))

    @property
    def predicts(self) -> str:
        return self.specs[0].config.predicts

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(name for spec in self.specs for name in spec.config.inputs)

    @property
    def heads(self) -> dict[str, AcceptanceHead]:
        """The heads by name; they share the bank's memory."""
        heads = {spec.name: AcceptanceHead(spec.config).requires_grad_(False).train(self.training) for spec in self.specs}
        networks = self._networks(heads)
        for stack, group in self.stacks_and_groups:
            stack.lend([networks[number] for number in group])
        return heads

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return logits (read-outs, N)."""
        logits = torch.cat([stack(self._assembled(stack, features)) for stack, _ in self.stacks_and_groups])
        numbers = torch.tensor([number for group in self.groups.values() for number in group], device=logits.device)
        return logits[numbers.argsort()]

    def standardise(self, features: Mapping[str, Tensor]) -> None:
        """Fix the shift and scale of all inputs from a sample."""
        for stack, _ in self.stacks_and_groups:
            stack.standardise(self._assembled(stack, features))

    def scale_gradients(self, factors: Tensor) -> None:
        """Multiply each read-out's gradient by its factor (read-outs,)."""
        for stack, group in self.stacks_and_groups:
            stack.scale_gradients(factors[group])

    def clip_gradients(self, largest: float) -> None:
        """Limit the norm of each read-out's gradient."""
        for stack, _ in self.stacks_and_groups:
            stack.clip_gradients(largest)

    def _assembled(self, stack: HeadStack, features: Mapping[str, Tensor]) -> Tensor:
        return assemble(stack.inputs, features, stack.readout.weight.dtype)

    def losses(self, logits: Tensor, labels: Mapping[str, Tensor], alive: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return sums of losses and sums of weights, (read-outs,) both, for logits (read-outs, N) and labels (N,) by name.

        `alive` (N,) are the weights of positions for heads that are weighted by survival; without them all weights are 1.
        """
        pairs = []
        for row, read_out in zip(logits, self.read_outs, strict=True):
            spec = read_out.spec
            survival = alive if spec.survival_weighted and alive is not None else 1.0
            pairs.append(weighted_bce(row, read_out.label(labels), spec.accept_weight, spec.reject_weight, survival))
        sums, weights = zip(*pairs, strict=True)
        return torch.stack(sums), torch.stack(weights)
