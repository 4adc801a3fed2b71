"""Checks of a GPU.

Without one `-m full` runs them on the CPU, with a stand-in for captured steps, to see that they
work.

Steps are captured uncompiled; with SPECHEADS_COMPILE_ALL=1 they are compiled first, which takes a
minute for each.
"""

import os
from pathlib import Path

import pytest
import torch

from specheads import load_pair
from specheads.decoding.engine import cuda_graph

HERE = Path(__file__).parent
ON_CPU = not torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items):
    for item in items:
        if ON_CPU and HERE in item.path.parents:
            item.add_marker("full")


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
