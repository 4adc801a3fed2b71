"""What is set up where models are read."""

import pytest
import torch
from fakes import tiny_pair
from transformers.utils import logging as hf_logging

from specheads import load_pair
from specheads.pair.language_model import LanguageModel


@pytest.fixture
def cudnn_attention():
    """Switched on, as torch begins."""
    kept = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(kept)


@pytest.mark.usefixtures("cudnn_attention")
def test_a_model_that_is_read_does_not_use_cudnn_attention():
    """Whoever reads it: a pair's models for generation, labels and training, and one that a user made."""
    pair = tiny_pair()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert pair.draft_lm.vocab_size and not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    LanguageModel(pair.target)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()


def test_loading_shows_no_bar(capfd):
    load_pair("nano")
    assert "Loading" not in capfd.readouterr().err
    assert hf_logging.is_progress_bar_enabled()  # for whatever else this process does
