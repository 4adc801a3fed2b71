"""The machine that a measurement ran on: its versions and kernels' flags, and how fast it could be."""

import os
import platform
import re
import statistics
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from benchmarks.results import processor
from benchmarks.steps import bandwidth, now

# Bytes per second of memory and dense bfloat16 operations per second, from the makers' data sheets; the first name that fits.
DATA_SHEETS = {
    "B200": (8.0e12, 2250e12),
    "H200 NVL": (4.8e12, 835e12),
    "H200": (4.8e12, 989e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100": (3.35e12, 989e12),
    "A100-SXM4-40GB": (1.555e12, 312e12),
    "A100": (2.039e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "RTX 4090": (1.008e12, 165e12),
}
FLAGS = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")


@dataclass(frozen=True)
class Limits:
    """How fast a device could read its memory (bytes per second) and multiply in bfloat16 (operations per second)."""

    bytes_per_second: float
    operations_per_second: float
    source: str


def limits_of(device: torch.device, size: int = 8192) -> Limits:
    """Return the limits of a device's data sheet, or where it is not known those of a large copy and of a large product.

    Args:
        size: of the square matrices that are multiplied where no data sheet is known.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    sheet = next((limits for known, limits in DATA_SHEETS.items() if is_called(name, known)), None)
    if sheet:
        return Limits(*sheet, source=f"data sheet of {name}")
    return Limits(bandwidth(device), product_speed(device, size), source="a large copy and a large product")


def is_called(name: str, known: str) -> bool:
    """Whether a GPU's name contains a known one as whole words: a GH200 is no H200."""
    return re.search(rf"\b{re.escape(known)}\b", name) is not None


def product_speed(device: torch.device, size: int) -> float:
    """Return the operations per second of a product of two square bfloat16 matrices of random numbers."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    taken = []
    for _ in range(10):
        start = now(device)
        left @ right
        taken.append(now(device) - start)
    return 2 * size**3 / statistics.median(taken[3:])


def description(device: torch.device) -> dict[str, Any]:
    """Return versions, flags of kernels, and the sizes of the device."""
    backends = torch.backends.cuda
    content: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "flags": {name: getattr(backends, name)() for name in FLAGS},
    }
    content["flags"] |= {"float32_products": torch.get_float32_matmul_precision(), "tf32": backends.matmul.allow_tf32}
    content["variables"] = {
        name: value for name, value in os.environ.items() if name.startswith(("SPECHEADS_", "TORCH", "CUDA_"))
    }
    if device.type != "cuda":
        return content | {"gpu": None}
    properties = torch.cuda.get_device_properties(device)
    return content | {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "triton": has_triton(),
    }


def has_triton() -> bool:
    """Return whether torch can compile for this device."""
    from torch.utils._triton import has_triton as torch_has_triton  # takes a second to find out

    return torch_has_triton()
