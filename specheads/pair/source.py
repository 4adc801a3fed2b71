"""Where a model of a pair is, and how this machine loads it: what of a pair's description needs
torch.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from specheads.errors import UserError
from specheads.pair.config import PairConfig
from specheads.pair.quantization import FORMS, QUANTIZATIONS, check_quantization


@dataclass(frozen=True)
class ModelSource:
    """Where a model is and how it is loaded.

    The keys are those of PairConfig, without the other model's.
    """

    location: str | Path
    revision: str | None = None
    dtype: str | torch.dtype = "auto"
    device: str = "cpu"
    device_map: str | None = None
    trust_remote_code: bool = False
    quantization: str | None = None

    @classmethod
    def of(cls, config: PairConfig, role: str) -> "ModelSource":
        """Return where the draft or the target of a pair is and how it is loaded.

        Raises UserError for a device or a quantization that is not possible here.
        """
        is_draft = role == "draft"
        quantization = config.draft_quantization if is_draft else config.quantization
        try:
            check_quantization(quantization)
        except ValueError as error:
            key = "draft_quantization" if is_draft else "quantization"
            raise UserError(f"model.{key}={quantization} {error}.") from None
        return cls(
            config.draft if is_draft else config.target,
            config.draft_revision if is_draft else config.target_revision,
            config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
            checked_device(config.device),
            None if is_draft else config.device_map,
            config.trust_remote_code in (True, role),
            quantization,
        )

    @property
    def rounded_form(self) -> str | None:
        """The GGUF name of the form to which weights are rounded, in place of a package that stores
        them.
        """
        on_cpu = torch.device(self.device).type == "cpu" and not (
            self.device_map and torch.cuda.is_available()
        )
        return FORMS.get(self.quantization or "") if on_cpu else None

    def bytes_per_weight(self, dtype: torch.dtype) -> float:
        """Return the bytes that a weight takes in memory, in this type unless it is quantized."""
        if self.quantization is None or self.rounded_form:
            return dtype.itemsize
        return QUANTIZATIONS[self.quantization].num_bytes


def checked_device(device: str | None) -> str:
    """Return the device for models; None is cuda if there is one, and each process's own.

    Raises UserError for an unknown one.
    """
    if device is None:
        rank = os.environ.get("LOCAL_RANK")
        return ("cuda" if rank is None else f"cuda:{rank}") if torch.cuda.is_available() else "cpu"
    try:
        if torch.empty(0, device=device).is_meta:
            raise RuntimeError("its tensors have no numbers")
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # what torch raises for unknown names, and for a build without that device
        raise UserError(
            f"device={device!r} cannot be used here ({str(error).splitlines()[0]}); use cpu, or"
            " null to choose automatically."
        ) from None
    return device
