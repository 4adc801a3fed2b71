"""Checks that need a GPU: skipped where there is none.

With SPECHEADS_GPU_TESTS=cpu they run on the CPU, where captured steps are replayed by a stand-in, to see that the checks work.
Steps are captured uncompiled; with SPECHEADS_COMPILE_ALL=1 they are compiled first, which takes a minute for each.
"""

import os
from pathlib import Path

import pytest
import torch

from specheads import load_pair
from specheads.decoding.engine import cuda_graph

HERE = Path(__file__).parent
ON_CPU = os.environ.get("SPECHEADS_GPU_TESTS") == "cpu"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() or ON_CPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU; SPECHEADS_GPU_TESTS=cpu runs it on the CPU, with a stand-in for graphs")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device():
    return torch.device("cpu" if ON_CPU else "cuda")


@pytest.fixture(scope="module", autouse=True)
def _uncompiled():
    """Captured steps are not compiled, except where all are."""
    with pytest.MonkeyPatch.context() as patch:
        if "SPECHEADS_COMPILE_ALL" not in os.environ:
            patch.setattr(cuda_graph, "has_triton", lambda: False)
        yield


@pytest.fixture(scope="session")
def nano64_there(device):
    """Nano in float64 on the device."""
    return load_pair("nano", dtype="float64", device=str(device))
