"""The prompts that a head learned from, as a file of its folder, so that no evaluation reports on them.

A prompt's id is 64 bits of SHA-256 as 16 hex digits; the file holds the ids as int64, so those of 40,000 prompts take 320 KB.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specheads.errors import UserError
from specheads.files import write_whole

FILE = "train_prompts.safetensors"


@dataclass(frozen=True, eq=False)
class TrainPrompts:
    """Ids (n,) int64 of the prompts that a head was trained on, and of the dev prompts that it was calibrated on."""

    train: Tensor
    dev: Tensor

    @classmethod
    def of(cls, train: Iterable[str], dev: Iterable[str] = ()) -> "TrainPrompts":
        """Return those of prompt ids as data caches have them."""
        return cls(_numbers(train), _numbers(dev))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], where: str) -> "TrainPrompts":
        """Return what a file `where` holds; raises UserError where that is something else."""
        found = {name: (str(tensor.dtype).removeprefix("torch."), tensor.dim()) for name, tensor in tensors.items()}
        if found != {"train": ("int64", 1), "dev": ("int64", 1)}:
            told = ", ".join(f"{name} {dtype} of {dims} dimensions" for name, (dtype, dims) in sorted(found.items())) or "nothing"
            raise UserError(f"{where} holds {told}, expected lists train and dev of int64; export the head again.")
        return cls(tensors["train"], tensors["dev"])

    def calibrated_on(self, dev: Iterable[str]) -> "TrainPrompts":
        """Return these train prompts with the dev prompts of another calibration."""
        return replace(self, dev=_numbers(dev))

    def write(self, folder: Path) -> None:
        """Write the file into a head's folder."""
        write_whole(folder / FILE, lambda path: save_file({"train": self.train, "dev": self.dev}, path))


def id_number(prompt_id: str) -> int:
    """Return a prompt id as the file has it, a signed number of 64 bits; an id of another form counts as the hash of its text."""
    if not re.fullmatch("[0-9a-f]{16}", prompt_id):
        prompt_id = hashlib.sha256(prompt_id.encode()).hexdigest()[:16]
    number = int(prompt_id, 16)
    return number - 2**64 if number >= 2**63 else number


def _numbers(prompt_ids: Iterable[str]) -> Tensor:
    return torch.tensor(sorted({id_number(prompt_id) for prompt_id in prompt_ids}), dtype=torch.int64)
