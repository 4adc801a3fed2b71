import pytest
import torch

from specheads.decoding.engine.cpu import load_operators


@pytest.fixture(scope="session")
def built_operators():
    assert load_operators()


@pytest.fixture(params=[1, 2, 5])  # one, as many as have work, and more than there are cores
def threads(request):
    kept = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(kept)
