"""Where both models are while a draft trains: its weights may be spread over processes, and the target may leave its device.

FSDP2 (torch's fully_shard) gathers the weights of a layer while it runs, and the others, of embeddings and norms, while the whole
draft runs. The draft is read in two steps, states and logits, neither of which is the forward pass of its class: `within_forward`
makes one of a function.
"""

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

Result = TypeVar("Result")


def shard(draft: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Spread the weights of a draft over the processes of a mesh; gradients are averaged over them."""
    layers = getattr(draft, "_no_split_modules", None) or ()
    for module in draft.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(draft, mesh=mesh)
    if torch.distributed.get_backend(mesh.get_group()) != "nccl":
        # Gloo has summed where the mean was asked for (pytorch #162338); asked for sums, FSDP2 divides them itself.
        for module in draft.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    draft.called = lambda call, *arguments: call(*arguments)
    register_fsdp_forward_method(draft, "called")


def is_sharded(draft: PreTrainedModel) -> bool:
    """Whether the weights of a draft are spread over processes."""
    return isinstance(draft, FSDPModule)


def within_forward(draft: PreTrainedModel, call: Callable[..., Result], *arguments: Any) -> Result:
    """Call, as a forward pass of a draft that `shard` has spread: its weights are gathered, and gradients go back to them.

    Layers may run any number of times in it, the same number in all processes.
    """
    return draft.called(call, *arguments)


class TargetPlace:
    """Moves a target out of the way of a training that reads its stored distributions; at the end of the block it is back."""

    def __init__(self, target: PreTrainedModel, leaves: bool) -> None:
        self._targets = (target,)  # in a tuple, so that a module that has this place does not take the target for its part
        self.leaves, self.device = leaves, target.device

    def leave(self) -> None:
        """Move the target to the CPU, if it leaves, and give its memory to the training."""
        self._move(torch.device("cpu"))
        if self.leaves and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Move the target back to its device."""
        self._move(self.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.come_back()

    def _move(self, device: torch.device) -> None:
        if self.leaves:
            with torch.inference_mode(False):  # validation runs in it, and weights made in it could not be used outside
                self._targets[0].to(device)
