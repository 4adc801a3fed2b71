"""Muon for the matrices of a model's layers, AdamW for everything else: one optimizer, in a type that the processor multiplies.

`torch.optim.Muon` orthogonalizes in bfloat16 only, which took three quarters of a training step on a CPU without instructions for
it, and leaves the other weights to a second optimizer.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specheads.language_model import MATRIX_INSTRUCTIONS, VECTOR_INSTRUCTIONS, has_instructions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of the quintic polynomial, chosen to raise small singular values quickly, not to converge to 1.
COEFFICIENTS = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
MOMENTUM = 0.95  # Nesterov's, of matrices
BETAS, EPS = (0.9, 0.95), 1e-8  # of AdamW


class Muon(torch.optim.Optimizer):
    """Move a model's matrices by their orthogonalized momentum and its embeddings, norms and biases by AdamW.

    Args:
        model: its weights that require a gradient are moved.
        matrix_lr: the learning rate of matrices.
        lr: the learning rate of everything else.
        matrix_decay: decoupled weight decay of matrices.

    Source: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """

    def __init__(self, model: "PreTrainedModel", matrix_lr: float, lr: float, matrix_decay: float = 0.0) -> None:
        embeddings = {id(each.weight) for each in (model.get_input_embeddings(), model.get_output_embeddings())}
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        matrices = [weight for weight in weights if weight.ndim == 2 and id(weight) not in embeddings]
        chosen = {id(weight) for weight in matrices}
        others = [weight for weight in weights if id(weight) not in chosen]
        groups = [
            {"params": matrices, "lr": matrix_lr, "decay": matrix_decay, "matrices": True},
            {"params": others, "lr": lr, "decay": 0.0, "matrices": False},
        ]
        super().__init__([group for group in groups if group["params"]], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every weight that has a gradient, after `closure`, which computes them; return what that returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [weight for weight in group["params"] if weight.grad is not None]
            if group["matrices"]:
                self._move_matrices(group, moved)
            else:
                for weight in moved:
                    self._move(group, weight, weight.grad)
        return loss

    def _move_matrices(self, group: Mapping[str, Any], matrices: list[Tensor]) -> None:
        by_shape = defaultdict(list)  # the matrices of one shape are orthogonalized together
        for matrix in matrices:
            by_shape[matrix.shape, matrix.device].append(matrix)
        for ((rows, columns), device), alike in by_shape.items():
            momenta = torch.stack([self._momentum(matrix, matrix.grad) for matrix in alike])  # type: ignore[arg-type]
            updates = orthogonalized(momenta.to(multiplied_dtype(device)))
            rate = group["lr"] * max(1.0, rows / columns) ** 0.5
            for matrix, update in zip(alike, updates, strict=True):
                matrix.mul_(1 - group["lr"] * group["decay"]).sub_(update.to(matrix.dtype), alpha=rate)

    def _momentum(self, matrix: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        return torch.lerp(gradient, state["momentum"], MOMENTUM)

    def _move(self, group: Mapping[str, Any], weight: Tensor, gradient: Tensor) -> None:
        state = self.state[weight]
        if not state:
            state.update(step=torch.zeros(()), mean=torch.zeros_like(weight), square=torch.zeros_like(weight))
        state["step"] += 1
        state["mean"].lerp_(gradient, 1 - BETAS[0])
        state["square"].lerp_(gradient.square(), 1 - BETAS[1])
        mean, square = (1 - beta ** float(state["step"]) for beta in BETAS)
        weight.addcdiv_(state["mean"], (state["square"] / square).sqrt_().add_(EPS), value=-group["lr"] / mean)


def multiplied_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where a device has instructions to multiply it, or else float32."""
    fast = device.type == "cuda" or (device.type == "cpu" and has_instructions(*MATRIX_INSTRUCTIONS, *VECTOR_INSTRUCTIONS))
    return torch.bfloat16 if fast else torch.float32


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
