"""The formats in which a head is written for other decoders, each into the head's folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specheads.heads.head import AcceptanceHead
from specheads.heads.portable import loaders
from specheads.integrations import onnx, specdecpp, torch_export


@dataclass(frozen=True)
class Format:
    """A sentence about what is written, and the function that writes it into a head's folder and returns its path."""

    about: str
    write: Callable[[AcceptanceHead, Path], Path]


FORMATS = {
    "standalone": Format(
        "acceptance_head.py, which needs torch and safetensors alone",
        lambda head, folder: loaders.write_loader(folder, loaders.STANDALONE),
    ),
    "transformers": Format(
        "custom_generate/generate.py, for generate(custom_generate=<folder>); heads that were exported long ago lack it",
        lambda head, folder: loaders.write_loader(folder, loaders.CUSTOM_GENERATE),
    ),
    "onnx": Format("head.onnx, for onnxruntime (pip install 'specheads[onnx]')", onnx.write_onnx),
    "torch_export": Format("head.pt2, an exported torch program", torch_export.write_program),
    "specdecpp": Format(
        "a folder that the SpecDec++ authors' code loads, if their network can compute the same", specdecpp.write_theirs
    ),
}
