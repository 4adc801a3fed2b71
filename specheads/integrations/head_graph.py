"""What a head says of one token, as a module for tracers: named features in, logit and calibrated chance out."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from specheads.errors import UserError
from specheads.heads.calibration import IndexCalibration, calibrated
from specheads.heads.head import AcceptanceHead

TOLERANCE = 1e-5  # of what an exported head gives, in proportion to outputs above one
BATCHES = (3, 1, 17)  # that an export is tried on; not the one that it was traced with


class Judgement(nn.Module):
    """Features (B, size) or (B,) -> `logit` (B,) and `acceptance` (B,), calibrated by the judged token's `index` (B,) long in its draft, from 0."""

    def __init__(self, head: AcceptanceHead) -> None:
        super().__init__()
        self.head = head
        slope, intercept = IndexCalibration.from_dict(head.config.calibration).rows(1, torch.device("cpu"))
        self.register_buffer("slope", slope.clone())
        self.register_buffer("intercept", intercept.clone())

    def forward(self, features: Mapping[str, Tensor], index: Tensor) -> tuple[Tensor, Tensor]:
        logit = self.head({**features, "index": index})
        rows = (row.expand(index.shape[0], -1) for row in (self.slope, self.intercept))
        return logit, calibrated(logit, index, *rows).sigmoid()


def example(head: AcceptanceHead, batch: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return what a head is asked about `batch` tokens: features by name, and their index."""
    config, generator = head.config, torch.Generator().manual_seed(batch)
    sizes = {"hidden": config.hidden_size, "embedding": config.embedding_size, "target_hidden": config.target_size}
    found, start = {}, 0
    for name in config.inputs:
        size = sizes.get(name, 1)
        # States and embeddings of the scale that the head was trained on; at another its outputs are far from any that occur.
        mean, scale = (tensor[start : start + size].cpu() for tensor in (head.input_mean, head.input_scale))
        if name in sizes:
            found[name] = torch.randn(batch, size, generator=generator) / scale + mean
        elif name != "index":
            found[name] = torch.rand(batch, generator=generator)
        start += size
    return found, torch.arange(batch) % 11


def traced(head: AcceptanceHead) -> torch.export.ExportedProgram:
    """Return a head's judgement as a graph for batches of any size."""
    given, batch = example(head, 2), torch.export.Dim("batch")
    return torch.export.export(
        Judgement(head).eval(), given, dynamic_shapes=({name: {0: batch} for name in given[0]}, {0: batch})
    )


def check_same(
    head: AcceptanceHead, judge: Callable[[Mapping[str, Tensor], Tensor], tuple[Tensor, Tensor]], where: object
) -> None:
    """Raise UserError unless `judge` gives what the head gives, on batches of several sizes."""
    ours = Judgement(head)
    for batch in BATCHES:
        given = example(head, batch)
        with torch.no_grad():
            pairs = zip(judge(*given), ours(*given), strict=True)
        difference = max(((found - expected).abs() / expected.abs().clamp_min(1)).max().item() for found, expected in pairs)
        if not difference < TOLERANCE:
            raise UserError(
                f"{where} differs from the head by {difference:.3g}, expected at most {TOLERANCE}; use format=standalone, or another "
                "version of the exporter."
            )
