"""Where numbers come from: the device and the versions that reports name."""

import platform
from importlib import metadata

import torch

from specheads.pair import Pair


def device_name(pair: Pair) -> str:
    device = pair.target_lm.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def versions() -> dict[str, str]:
    """Return the versions of what decides the numbers."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in ("specheads", "torch", "transformers")
    }
