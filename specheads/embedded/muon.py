"""The Muon optimizer in a type that the processor multiplies.

`torch.optim.Muon` orthogonalizes in bfloat16 only. Without instructions for it that took three quarters of a training step.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Of the quintic polynomial, chosen to raise small singular values quickly, not to converge to 1.
COEFFICIENTS = 3.4445, -4.7750, 2.0315
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Move matrices by their orthogonalized momentum (Nesterov's), with decoupled weight decay.

    Source: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the base class has two forms, of which one is used
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape = defaultdict(list)  # the matrices of one shape are orthogonalized together
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for (rows, columns), matrices in by_shape.items():
                momenta = torch.stack([self._momentum(matrix, matrix.grad, group["momentum"]) for matrix in matrices])
                updates = orthogonalized(momenta.to(self.dtype))
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.to(matrix.dtype), alpha=rate)

    def _momentum(self, matrix: Tensor, gradient: Tensor, momentum: float) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].lerp_(gradient, 1 - momentum)
        return torch.lerp(gradient, state["momentum"], momentum)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return matrices (n, rows, columns) with the same singular vectors, their singular values between about 0.7 and 1.2."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalized(matrices.mT).mT
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
