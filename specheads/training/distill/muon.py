"""The optimizer of a draft: matrices of its layers move by Muon (Jordan et al. 2024), all else by
AdamW.

One learning rate fits both (Liu et al. 2025, section 2.2). torch.optim.Muon is for bfloat16: 46
times slower with AVX2 alone.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from specheads.pair.feature_draft import FeatureDraft

# Of x, x^3 and x^5: in five turns singular values from 0.001 to 1 come close to 1 (Jordan)
_QUINTIC = 3.4445, -4.7750, 2.0315
# 0.2: the root mean square of AdamW's steps (Liu et al.)
_TURNS = 5
_MOMENTUM = 0.95
_SIZE = 0.2


def matrices_of_layers(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the matrices that are neither embeddings nor the output.

    None of a draft that reads its target: AdamW alone taught mini's more (an overlap of 0.36, not
    0.26, after 126 steps at a learning rate of 0.002).
    """
    if isinstance(model, FeatureDraft):
        return []
    output = model.get_output_embeddings()
    tables = set[int]()
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is output:
            tables.add(id(module.weight))
    matrices = list[nn.Parameter]()
    for weight in model.parameters():
        if weight.ndim == 2 and id(weight) not in tables:
            matrices.append(weight)
    return matrices


class MuonAndAdamW(torch.optim.AdamW):
    """AdamW of weights, and Muon of those among them that are `matrices`, computed in `dtype`."""

    def __init__(
        self,
        weights: Iterable[Tensor],
        matrices: Iterable[Tensor],
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        # One group: sharded checkpoints know weights by their order
        super().__init__(weights, lr, weight_decay=weight_decay)
        self._matrices = set(map(id, matrices))
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return what the closure returns, after a step by the gradients that it has left."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        moved = []
        for group in self.param_groups:
            for weight in group["params"]:
                if id(weight) in self._matrices and weight.grad is not None:
                    self._move(weight, weight.grad, group["lr"], group["weight_decay"])
                    moved.append((weight, weight.grad))
                    weight.grad = None  # which AdamW leaves alone
        super().step()
        for weight, gradient in moved:
            weight.grad = gradient
        return result

    def _move(self, weight: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[weight]
        if not state:
            # AdamW expects steps when it is loaded
            state.update(step=torch.zeros(()), momentum=torch.zeros_like(weight))
        momentum = state["momentum"].lerp_(gradient, 1 - _MOMENTUM)
        direction = gradient.lerp(momentum, _MOMENTUM)
        # FSDP2: every process computes the whole, and keeps its part
        if isinstance(direction, DTensor):
            whole = orthogonalized(direction.full_tensor(), self._dtype)
            direction = distribute_tensor(whole, direction.device_mesh, direction.placements)
        else:
            direction = orthogonalized(direction, self._dtype)
        weight.mul_(1 - lr * weight_decay)
        weight.add_(direction, alpha=-lr * _SIZE * max(weight.shape) ** 0.5)


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix (M, N) with singular values near 1, computed in `dtype` (Newton-Schulz)."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).to(dtype)
    x = x / x.norm().clamp_min(torch.finfo(torch.float32).tiny)
    a, b, c = _QUINTIC
    for _ in range(_TURNS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).to(matrix.dtype)
