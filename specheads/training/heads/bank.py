"""Several heads trained side by side on the same hidden states; a single head is a bank of one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.heads.portable.network import assemble
from specheads.training.heads.head_loss import weighted_bce
from specheads.training.heads.stack import HeadStack


@dataclass(frozen=True)
class HeadSpec:
    """One head of a bank: its config and the weights of its loss."""

    name: str
    config: HeadConfig
    accept_weight: float = 1.0
    reject_weight: float = 1.0
    survival_weighted: bool = False


class HeadBank(nn.Module):
    """Heads of one kind (`predicts`) that read the same features, in as few batched computations as their shapes allow.

    Each is initialised from the same seed and learns as if it were trained alone.
    """

    def __init__(self, specs: list[HeadSpec], seed: int) -> None:
        super().__init__()
        self.specs = specs
        heads = []
        for spec in specs:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                heads.append(AcceptanceHead(spec.config))
        self.groups: dict[tuple, list[int]] = {}  # numbers of the heads that can be stacked
        for number, spec in enumerate(specs):
            self.groups.setdefault((spec.config.inputs, spec.config.width), []).append(number)
        self.stacks = nn.ModuleList(HeadStack([heads[number] for number in group]) for group in self.groups.values())

    @property
    def stacks_and_groups(self) -> list[tuple[HeadStack, list[int]]]:
        """Each stack with the numbers of its heads."""
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
        by_number: dict[int, AcceptanceHead] = {}
        for stack, group in self.stacks_and_groups:
            by_number |= dict(zip(group, stack.heads(), strict=True))
        return {spec.name: by_number[number] for number, spec in enumerate(self.specs)}

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Return logits (heads, N)."""
        logits = torch.cat([stack(self._assembled(stack, features)) for stack, _ in self.stacks_and_groups])
        numbers = torch.tensor([number for group in self.groups.values() for number in group], device=logits.device)
        return logits[numbers.argsort()]

    def standardise(self, features: Mapping[str, Tensor]) -> None:
        """Fix the shift and scale of all heads' inputs from a sample."""
        for stack, _ in self.stacks_and_groups:
            stack.standardise(self._assembled(stack, features))

    def scale_gradients(self, factors: Tensor) -> None:
        """Multiply each head's gradient by its factor (heads,)."""
        for stack, group in self.stacks_and_groups:
            stack.scale_gradients(factors[group])

    def clip_gradients(self, largest: float) -> None:
        """Limit the norm of each head's gradient."""
        for stack, _ in self.stacks_and_groups:
            stack.clip_gradients(largest)

    def _assembled(self, stack: HeadStack, features: Mapping[str, Tensor]) -> Tensor:
        return assemble(stack.configs[0].inputs, features, stack.readout.weight.dtype)

    def losses(self, logits: Tensor, labels: Mapping[str, Tensor], alive: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return each head's sum of losses and sum of weights, (heads,) both, for logits (heads, N) and labels (N,) by name.

        `alive` (N,) are the weights of positions for heads that are weighted by survival; without them all weights are 1.
        """
        pairs = []
        for row, spec in zip(logits, self.specs, strict=True):
            survival = alive if spec.survival_weighted and alive is not None else 1.0
            pairs.append(weighted_bce(row, labels[spec.config.label], spec.accept_weight, spec.reject_weight, survival))
        sums, weights = zip(*pairs, strict=True)
        return torch.stack(sums), torch.stack(weights)
