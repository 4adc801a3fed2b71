"""The machine that a measurement ran on, how fast it could be, and the models that are measured on it."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from benchmarks.steps import bandwidth, timed
from specheads import load_pair
from specheads.pair.pair import Pair

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
PAIRS = {"llama3": "synthetic-llama3", "llama2": "synthetic-llama2", "tiny": "synthetic-tiny"}


@dataclass(frozen=True)
class Machine:
    """Where a script measures, and whether with models so small that it only shows that the script works."""

    device: torch.device
    tiny: bool

    @property
    def engine(self) -> str:
        """The engine of decoding; compiling would take longer than a tiny model's measurement."""
        return "eager" if self.tiny else "auto"

    @property
    def repeats(self) -> int:
        """How often a step is timed."""
        return 2 if self.tiny else 20

    @cached_property
    def limits(self) -> tuple[float, float]:
        """Bytes per second and bfloat16 operations per second: of the data sheet, or of a large copy and a large product."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        # By whole words: a GH200 is no H200.
        sheet = next((limits for known, limits in DATA_SHEETS.items() if re.search(rf"\b{known}\b", name)), None)
        return sheet or (bandwidth(self.device), _product_speed(self.device, 64 if self.tiny else 8192))

    def pair(self, name: str = "llama3", **keys: Any) -> Pair:
        """Return a pair of random weights, which are made on the device, or the smallest in its place."""
        dtype = "float32" if self.device.type == "cpu" else "bfloat16"
        return load_pair(PAIRS["tiny" if self.tiny else name], device=str(self.device), dtype=dtype, **keys)


def _product_speed(device: torch.device, size: int) -> float:
    """Return the operations per second of a product of two square bfloat16 matrices of random numbers."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / timed(lambda: left @ right, device, 7)
