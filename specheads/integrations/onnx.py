"""A head as an ONNX graph, for decoders without Python or torch."""

import logging
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead
from specheads.integrations.head_graph import check_same, example_inputs, traced
from specheads.storage.files import write_whole

FILE = "head.onnx"


def write_onnx(head: AcceptanceHead, folder: Path) -> Path:
    """Write `head.onnx`, checked against the head by onnxruntime; return its path.

    Its inputs are the head's features by name, (batch, size) or (batch,) float32, and `index` (batch,) int64; its outputs are
    `logit` and `acceptance`, (batch,) each.

    Raises:
        UserError: missing packages, or a graph that computes something else.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  what torch writes graphs with
    except ImportError as error:
        raise UserError(f"format=onnx needs {error.name}: pip install 'specheads[onnx]'.") from None
    path, names = folder / FILE, [*example_inputs(head, 1)[0], "index"]
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)  # it warns that torchvision is missing, which a head does not use
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # by torch, about its pytrees
            graph = torch.onnx.export(traced(head), input_names=names, output_names=["logit", "acceptance"], verbose=False)
    finally:
        registration.setLevel(level)
    assert graph is not None  # only torch's former exporter returns None

    def write(temporary: Path) -> None:
        graph.save(temporary)
        session = onnxruntime.InferenceSession(temporary, providers=["CPUExecutionProvider"])
        check_same(head, partial(run_session, session), FILE)

    write_whole(path, write)
    return path


def run_session(session: Any, features: Mapping[str, Tensor], index: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and calibrated chances of acceptance (B,), computed by an onnxruntime session."""
    inputs = {name: value.numpy() for name, value in {**features, "index": index}.items()}
    logit, acceptance = session.run(None, inputs)
    return torch.from_numpy(logit), torch.from_numpy(acceptance)
