"""The prompts that a head was trained on, by hashes of their words, in a file of its folder: no
evaluation reports on them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specheads.heads.portable.tensor_file import write_tensors
from specheads.storage.files import write_whole

FILE = "train_prompts.safetensors"


@dataclass(frozen=True, eq=False)
class TrainPrompts:
    """Numbers (n,) int64 of the prompts that a head was trained on, and of the dev prompts that it
    was calibrated on.
    """

    train: Tensor
    dev: Tensor

    @classmethod
    def of(cls, train: Iterable[str], dev: Iterable[str] = ()) -> "TrainPrompts":
        """Return the numbers of prompts from their texts."""
        return cls(_numbers(train), _numbers(dev))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "TrainPrompts":
        """Return the content of a file. Raises ValueError for tensors of other names or types."""
        types = {name: (tensor.dtype, tensor.dim()) for name, tensor in tensors.items()}
        if types != dict.fromkeys(("train", "dev"), (torch.int64, 1)):
            raise ValueError(f"{FILE} must hold lists train and dev of int64")
        return cls(tensors["train"], tensors["dev"])

    @property
    def fingerprint(self) -> str:
        """Of the prompts that the head was trained on, whichever it is calibrated on later."""
        return hashlib.sha256(self.train.numpy().tobytes()).hexdigest()[:16]

    def write(self, folder: Path) -> None:
        write_whole(folder / FILE, lambda path: write_tensors(vars(self), path))


def text_hash(text: str) -> int:
    """Return the hash of a prompt's words, regardless of case and white space."""
    return int.from_bytes(
        hashlib.sha256(" ".join(text.lower().split()).encode()).digest()[:8], "big", signed=True
    )


def _numbers(texts: Iterable[str]) -> Tensor:
    return torch.tensor(sorted({text_hash(text) for text in texts}), dtype=torch.int64)
