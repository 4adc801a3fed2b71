"""What a head can be written as for other decoders; each format goes into the head's own folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specheads.heads import specdecpp
from specheads.heads.head import AcceptanceHead
from specheads.heads.portable import loaders
from specheads.integrations import onnx, torch_export


@dataclass(frozen=True)
class Format:
    """What is written, and the function that writes it into a head's folder and returns where it is."""

    about: str
    write: Callable[[AcceptanceHead, Path], Path]


FORMATS = {
    "standalone": Format(
        "acceptance_head.py, which needs torch and safetensors alone",
        lambda head, folder: loaders.write_loader(folder, loaders.STANDALONE),
    ),
    "transformers": Format(
        "custom_generate/generate.py, for generate(custom_generate=<folder>); there already, unless the head is an old one",
        lambda head, folder: loaders.write_loader(folder, loaders.CUSTOM_GENERATE),
    ),
    "onnx": Format("head.onnx, for onnxruntime (pip install 'specheads[onnx]')", onnx.write_onnx),
    "torch_export": Format("head.pt2, an exported torch program", torch_export.write_program),
    "specdecpp": Format(
        "a folder that the SpecDec++ authors' code loads, if their network can be this head", specdecpp.write_theirs
    ),
}
