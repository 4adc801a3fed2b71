from dataclasses import replace

import pytest
import torch
from fakes import tiny_llama


@pytest.fixture
def small_pair(nano):
    """A pair that is smaller than nano, with its tokenizer; the draft is the target with noise."""
    target, draft = (tiny_llama(2048, seed=1, scale=4.0, window=512).float() for _ in range(2))
    torch.manual_seed(0)
    for weight in draft.parameters():
        weight += 0.2 * weight.std(correction=0) * torch.randn_like(weight)
    return replace(nano, target=target, draft=draft)
