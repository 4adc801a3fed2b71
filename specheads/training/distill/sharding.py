"""A draft whose weights are spread over processes.

FSDP2 (torch's fully_shard) gathers weights while the forward pass of a class runs; `within_forward` makes one of a function.
"""

from collections.abc import Callable
from typing import Any, TypeVar

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
    """Call, as the forward pass of a draft that is spread; its layers run equally often in all processes."""
    return draft.called(call, *arguments) if is_sharded(draft) else call(*arguments)
