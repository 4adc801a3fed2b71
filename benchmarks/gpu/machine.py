"""The machine that a measurement ran on, how fast it could be, and the models that are measured on it."""

import re
from dataclasses import dataclass
from functools import cached_property

import torch

from benchmarks.steps import bandwidth
from specheads import load_pair
from specheads.pair.pair import Pair

# Bytes per second of memory, from the makers' data sheets; the first name that fits.
DATA_SHEETS = {
    "B200": 8.0e12,
    "H200": 4.8e12,
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "A100-SXM4-40GB": 1.555e12,
    "A100": 2.039e12,
    "L40S": 0.864e12,
    "RTX 4090": 1.008e12,
}


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
    def bandwidth(self) -> float:
        """Bytes per second: of the data sheet, or of a large copy."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        # By whole words: a GH200 is no H200.
        sheet = next((speed for known, speed in DATA_SHEETS.items() if re.search(rf"\b{known}\b", name)), None)
        return sheet or bandwidth(self.device)

    def pair(self) -> Pair:
        """Return a pair of random weights, which are made on the device, of the size of Llama 3 or of the smallest."""
        dtype = "float32" if self.device.type == "cpu" else "bfloat16"
        return load_pair("synthetic-tiny" if self.tiny else "synthetic-llama3", device=str(self.device), dtype=dtype)
