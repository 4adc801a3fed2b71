"""Where the target is while a draft trains: on its device, or in the CPU's memory except for validation."""

from typing import Self

import torch
from transformers import PreTrainedModel


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
