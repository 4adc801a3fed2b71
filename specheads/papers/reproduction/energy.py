"""The energy of decoding, which MJSD (Qin et al. 2024) reports: by NVML's counter of whole NVIDIA boards, without the host.

The counter moves about ten times a second, so that only sums over many responses say something.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch

from specheads.pair.pair import Pair

logger = logging.getLogger(__name__)


class EnergyCounter:
    """The sum of the counters of some GPUs."""

    def __init__(self, pynvml: Any, devices: Iterable[torch.device]) -> None:
        # By their ids, because CUDA_VISIBLE_DEVICES changes numbers and order.
        ids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices]
        self._pynvml, self._handles = pynvml, [pynvml.nvmlDeviceGetHandleByUUID(each) for each in ids]

    def joules(self) -> float:
        """Return the joules since an arbitrary moment; the counters are millijoules since their driver was loaded."""
        return 1e-3 * sum(map(self._pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handles))


def energy_counter(pair: Pair) -> EnergyCounter | None:
    """Return the counter of the GPUs that hold a pair, or None, with the reason in the log, where there is none."""
    devices = {weight.device for lm in (pair.target_lm, pair.draft_lm) for weight in lm.model.parameters()}
    gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
    if not gpus or torch.version.hip:
        logger.info("energy is not measured: it is that of NVIDIA's GPUs")
        return None
    try:
        import pynvml
    except ImportError:
        logger.info("energy is not measured: pip install 'specheads[energy]' for nvidia-ml-py, which reads NVIDIA's counter")
        return None
    try:
        pynvml.nvmlInit()
        counter = EnergyCounter(pynvml, gpus)
        counter.joules()
    except pynvml.NVMLError as error:
        logger.info("energy is not measured: %s; NVML counts whole GPUs since Volta, not their parts (MIG)", error)
        return None
    return counter
