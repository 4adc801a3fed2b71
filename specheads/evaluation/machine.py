"""The device and the versions that reports name."""

import os
import platform
from importlib import metadata

import torch

from specheads.pair import Pair


def device_name(pair: Pair) -> str:
    """Return the name of the device that the target runs on."""
    device = pair.target_lm.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that the numbers depend on."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in ("specheads", "torch", "transformers")
    }


def load_average() -> float | None:
    """Return the load average over the last minute; None where the system has none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
