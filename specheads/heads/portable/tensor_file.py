"""Tensors in a safetensors file with their checksum, so that no damage goes unnoticed: exported
files carry a copy of this.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors on the CPU with their names, types and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors on the CPU, and their checksum: the only metadata, as several are written in a
    random order.
    """
    # May share memory
    whole = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    save_file(whole, path, metadata={"sha256": checksum_of(whole)})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file.

    Raises ValueError if it is no safetensors file, or was changed since it was written.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            known = (file.metadata() or {}).get("sha256")
        # Files of earlier versions have none
        if known is not None and known != checksum_of(tensors):
            raise ValueError(
                "its tensors are not those that were written, as their checksum differs"
            )
    except (
        SafetensorError,
        ValueError,
        TypeError,
        RuntimeError,
    ) as error:  # all of these happen with damaged headers
        raise ValueError(
            f"{path} cannot be read ({error}); it is damaged or not a safetensors file."
        ) from None
    return tensors
