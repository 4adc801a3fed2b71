"""Files of a head for other decoders, written into its folder."""

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specheads.errors import UserError
from specheads.heads.calibration import IndexCalibration, calibrated
from specheads.heads.features import FEATURES, input_size
from specheads.heads.head import AcceptanceHead
from specheads.heads.portable import loaders
from specheads.storage.files import write_whole

TOLERANCE = 1e-5  # largest difference of an exported head's outputs, relative to outputs above one
BATCHES = (3, 1, 17)  # sizes that an export is tested with; it was traced with another

logger = logging.getLogger(__name__)


def write_onnx(head: AcceptanceHead, folder: Path) -> Path:  # pragma: no mutate block
    """Write `head.onnx`; return its path.

    Raises UserError for missing packages, or a graph that computes something else.

    Its inputs are the head's features by name, (batch, size) or (batch,) float32, and `index`
    (batch,) int64; its outputs are `logit` and `acceptance`, (batch,) each.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  what torch writes graphs with
    except ImportError as error:
        raise UserError(f"format=onnx needs {error.name}: pip install 'specheads[onnx]'.") from None
    path = folder / "head.onnx"
    names = [*_example_inputs(head, 1)[0], "index"]
    # It warns that torchvision is missing, which a head does not use.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns about its pytrees
        graph = torch.onnx.export(
            _traced(head), input_names=names, output_names=["logit", "acceptance"], verbose=False
        )
    assert graph is not None  # only torch's former exporter returns None

    def write(temporary: Path) -> None:
        graph.save(temporary)
        _check_same(
            head,
            onnxruntime.InferenceSession(temporary, providers=["CPUExecutionProvider"]),
            path.name,
        )

    write_whole(path, write)
    return path


class _CalibratedHead(nn.Module):
    """Features (B, size) or (B,) -> `logit` (B,) and `acceptance` (B,), calibrated by the token's
    `index` (B,) in its draft.
    """

    lines: Tensor  # (2, 1, indices), slopes and intercepts

    def __init__(self, head: AcceptanceHead) -> None:
        super().__init__()
        self.head = head
        fitted = IndexCalibration.from_dict(head.config.calibration)
        self.register_buffer("lines", torch.stack(fitted.rows(1, torch.device("cpu"))))

    def forward(self, features: Mapping[str, Tensor], index: Tensor) -> tuple[Tensor, Tensor]:
        logit = self.head(features)
        rows = self.lines.expand(-1, index.shape[0], -1)  # a view: a copy would fix the batch
        return logit, calibrated(logit, index, rows[0], rows[1]).sigmoid()


def _example_inputs(head: AcceptanceHead, batch: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return random inputs of a _CalibratedHead for `batch` tokens: features by name, and indices
    (batch,) long.
    """
    generator = torch.Generator().manual_seed(batch)
    features = dict[str, Tensor]()
    names = head.config.inputs
    sizes = [input_size([name], vars(head.config)) for name in names]
    # Vectors have the scale that the head was trained on; at another scale its outputs are far from
    # any that occur.
    scales = (tensor.cpu().split(sizes) for tensor in (head.input_mean, head.input_scale))
    for name, mean, scale in zip(names, *scales, strict=True):
        if FEATURES[name].size is None:
            features[name] = torch.rand(batch, generator=generator)
        else:
            features[name] = torch.randn(batch, len(mean), generator=generator) / scale + mean
    return features, torch.arange(batch) % 11


def _traced(head: AcceptanceHead) -> torch.export.ExportedProgram:  # pragma: no mutate block
    """Return a head with its calibration as a graph for batches of any size."""
    inputs = _example_inputs(head, 2)
    batch = torch.export.Dim("batch")
    shapes = {name: {0: batch} for name in inputs[0]}, {0: batch}
    return torch.export.export(_CalibratedHead(head).eval(), inputs, dynamic_shapes=shapes)


def _check_same(head: AcceptanceHead, session: Any, where: str) -> None:
    """Raise UserError unless an onnxruntime session computes what the head computes, on batches of
    several sizes.
    """
    original = _CalibratedHead(head)
    for batch in BATCHES:
        features, index = _example_inputs(head, batch)
        computed = session.run(
            None, {name: value.numpy() for name, value in {**features, "index": index}.items()}
        )
        with torch.no_grad():
            pairs = zip(map(torch.from_numpy, computed), original(features, index), strict=True)
        errors = [
            (actual - expected).abs() / expected.abs().clamp_min(1) for actual, expected in pairs
        ]
        difference = torch.cat(errors).max().item()  # NaN if one of them is
        if not difference < TOLERANCE:
            raise UserError(
                f"{where} differs from the head by {difference:.3g}, expected at most {TOLERANCE};"
                " use format=standalone, or another version of the exporter."
            )


# By name the functions that write into a head's folder and return the path of what they wrote.
FORMATS: dict[str, Callable[[AcceptanceHead, Path], Path]] = {
    "standalone": lambda head, folder: loaders.write_loader(folder, loaders.STANDALONE),
    "onnx": write_onnx,
}
