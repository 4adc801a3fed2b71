"""The energy of decoding, which experiments measure besides tokens (MJSD, Qin et al. 2024).

NVML's counter is of whole NVIDIA boards, without the host. It moves about ten times a second, so that only sums over many
responses say something.
"""

import logging
from collections.abc import Callable

import torch

from specheads.pair.pair import Pair

logger = logging.getLogger(__name__)

Meter = Callable[[], float]  # returns joules since an arbitrary moment


def energy_meter(pair: Pair) -> Meter | None:
    """Return the meter of the GPUs that hold a pair, or None, with the reason in the log, where there is none."""
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
        # By their ids, because CUDA_VISIBLE_DEVICES changes numbers and order.
        ids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in gpus]
        handles = [pynvml.nvmlDeviceGetHandleByUUID(each) for each in ids]

        def joules() -> float:
            return 1e-3 * sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles))

        joules()
    except pynvml.NVMLError as error:
        logger.info("energy is not measured: %s; NVML counts whole GPUs since Volta, not their parts (MIG)", error)
        return None
    return joules
