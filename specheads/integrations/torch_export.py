"""A head as an exported torch program, for C++, AOTInductor and ExecuTorch, and for Python without this project."""

from pathlib import Path

import torch

from specheads.heads.head import AcceptanceHead
from specheads.integrations.head_graph import check_same, traced
from specheads.storage.files import write_whole

FILE = "head.pt2"


def write_program(head: AcceptanceHead, folder: Path) -> Path:
    """Write `head.pt2`, reloaded and checked against the head; return its path.

    `torch.export.load(path).module()(features, index)` returns `logit` and `acceptance`, (B,) each, for features by name, (B,
    size) or (B,) float32, and `index` (B,) long.

    Raises:
        UserError: a program that computes something else.
    """
    path, graph = folder / FILE, traced(head)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as stream:  # torch refuses paths with another suffix
            torch.export.save(graph, stream)
        with temporary.open("rb") as stream:
            check_same(head, torch.export.load(stream).module(), FILE)

    write_whole(path, write)
    return path
