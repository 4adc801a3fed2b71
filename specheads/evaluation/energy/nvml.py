"""The energy of NVIDIA GPUs by NVML's counter (`nvmlDeviceGetTotalEnergyConsumption`): of whole boards, without the host."""

from collections.abc import Iterable
from typing import Any

import torch

from specheads.evaluation.energy.meter import NotMeasurable


class NvmlDevice:
    """The counter of one GPU, in millijoules since its driver was loaded."""

    def __init__(self, pynvml: Any, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.name = f"NVML {properties.name}"
        self._pynvml = pynvml
        # By its id, because CUDA_VISIBLE_DEVICES changes numbers and order.
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")

    def joules(self) -> float:
        return 1e-3 * self._pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)


def nvml_devices(devices: Iterable[torch.device]) -> list[NvmlDevice]:
    """Return the counters of GPUs.

    Raises:
        NotMeasurable: nvidia-ml-py is not installed, or NVML does not count the energy of a device.
    """
    if torch.version.hip:
        raise NotMeasurable("the energy of AMD's GPUs is not read; measure on an NVIDIA GPU.")
    try:
        import pynvml
    except ImportError:
        raise NotMeasurable("NVIDIA's counter is read by nvidia-ml-py; pip install 'specheads[energy]'.") from None
    counters = []
    for device in devices:
        try:
            pynvml.nvmlInit()
            counters.append(NvmlDevice(pynvml, device))
            counters[-1].joules()
        except pynvml.NVMLError as error:
            raise NotMeasurable(
                f"NVML does not count the energy of {device} ({error}); it does for whole GPUs since Volta, not for their "
                "parts (MIG)."
            ) from None
    return counters
