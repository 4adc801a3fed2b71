"""A head's prediction for one token as a module for tracers: named features in, logit and calibrated chance of acceptance out."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from specheads.errors import UserError
from specheads.features import FEATURES
from specheads.heads.calibration import IndexCalibration, calibrated
from specheads.heads.head import AcceptanceHead

TOLERANCE = 1e-5  # largest difference of an exported head's outputs, relative to outputs above one
BATCHES = (3, 1, 17)  # sizes that an export is tested with; it was traced with another


class CalibratedHead(nn.Module):
    """Features (B, size) or (B,) -> `logit` (B,) and `acceptance` (B,), calibrated by the token's `index` (B,) in its draft."""

    slope: Tensor  # (1, indices)
    intercept: Tensor  # (1, indices)

    def __init__(self, head: AcceptanceHead) -> None:
        """Take a head with the calibration of its config."""
        super().__init__()
        self.head = head
        slope, intercept = IndexCalibration.from_dict(head.config.calibration).rows(1, torch.device("cpu"))
        self.register_buffer("slope", slope.clone())
        self.register_buffer("intercept", intercept.clone())

    def forward(self, features: Mapping[str, Tensor], index: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and calibrated chances of acceptance (B,)."""
        logit = self.head({**features, "index": index})
        rows = (row.expand(index.shape[0], -1) for row in (self.slope, self.intercept))
        return logit, calibrated(logit, index, *rows).sigmoid()


def example_inputs(head: AcceptanceHead, batch: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return random inputs of a CalibratedHead for `batch` tokens: features by name, and indices (batch,) long."""
    generator = torch.Generator().manual_seed(batch)
    features, start = {}, 0
    for name in head.config.inputs:
        key = FEATURES[name].size
        size = 1 if key is None else getattr(head.config, key)
        # Vectors have the scale that the head was trained on; at another scale its outputs are far from any that occur.
        mean, scale = (tensor[start : start + size].cpu() for tensor in (head.input_mean, head.input_scale))
        if key is not None:
            features[name] = torch.randn(batch, size, generator=generator) / scale + mean
        elif name != "index":
            features[name] = torch.rand(batch, generator=generator)
        start += size
    return features, torch.arange(batch) % 11


def traced(head: AcceptanceHead) -> torch.export.ExportedProgram:
    """Return a head with its calibration as a graph for batches of any size."""
    inputs, batch = example_inputs(head, 2), torch.export.Dim("batch")
    return torch.export.export(
        CalibratedHead(head).eval(), inputs, dynamic_shapes=({name: {0: batch} for name in inputs[0]}, {0: batch})
    )


def check_same(
    head: AcceptanceHead, exported: Callable[[Mapping[str, Tensor], Tensor], tuple[Tensor, Tensor]], where: object
) -> None:
    """Raise UserError unless `exported` computes what the head computes, on batches of several sizes."""
    original = CalibratedHead(head)
    for batch in BATCHES:
        inputs = example_inputs(head, batch)
        with torch.no_grad():
            pairs = zip(exported(*inputs), original(*inputs), strict=True)
        difference = max(((actual - expected).abs() / expected.abs().clamp_min(1)).max().item() for actual, expected in pairs)
        if not difference < TOLERANCE:
            raise UserError(
                f"{where} differs from the head by {difference:.3g}, expected at most {TOLERANCE}; use format=standalone, or "
                "another version of the exporter."
            )
