"""Where numbers come from: the device and the versions that reports name."""

import os
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


def load_average() -> float | None:
    """Return how many processes wanted to run over the last minute; None where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
