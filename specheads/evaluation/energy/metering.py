"""Whether energy can be measured where a pair decodes: by which meter, or why not."""

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specheads.evaluation.energy.meter import IDLE_SECONDS, EnergyCounter, EnergyMeter, Idle, NotMeasurable
from specheads.evaluation.energy.nvml import nvml_devices
from specheads.evaluation.energy.rapl import POWERCAP, rapl_zones
from specheads.pair import Pair

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Metering:
    """A meter, or the reason why there is none."""

    meter: EnergyMeter | None
    reason: str | None = None

    @property
    def idle(self) -> Idle | None:
        """The power of the idle machine; None where there is no meter."""
        return None if self.meter is None else self.meter.idle

    def context(self) -> dict[str, Any]:
        """Return what a report says of it: what is counted, with the idle power; or why nothing is."""
        if self.meter is None:
            return {"not_measurable": self.reason}
        return {"counters": self.meter.names, "idle": asdict(self.meter.idle)}


def metering_of(pair: Pair, powercap: Path = POWERCAP) -> Metering:
    """Return how the energy of a pair's decoding can be measured; a meter first measures the idle power."""
    devices = {weight.device for lm in (pair.target_lm, pair.draft_lm) for weight in lm.model.parameters()}
    try:
        counters = counters_of(devices, powercap)
        logger.info("the energy of an idle machine is measured for %g s: %s", IDLE_SECONDS, ", ".join(c.name for c in counters))
        return Metering(EnergyMeter(counters))
    except NotMeasurable as error:
        return Metering(None, str(error))


def counters_of(devices: Iterable[torch.device], powercap: Path = POWERCAP) -> list[EnergyCounter]:
    """Return the counters of all devices: of GPUs if there are any, without their host; otherwise of the processors.

    Raises:
        NotMeasurable: there are none, or they may not be read.
    """
    gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
    return [*nvml_devices(gpus)] if gpus else [*rapl_zones(powercap)]
