"""What a head adds to a draft step, counted from the weights that a step multiplies by."""

import pytest
import torch
from families import CONFIGS, VOCAB_SIZE, WINDOW, tiny_model

from specheads import AcceptanceHead, HeadConfig
from specheads.decoding.step_times import _step_weights, counted_share
from specheads.pair.language_model import LanguageModel

HIDDEN = 32
# 32 weights and a bias, float32
HEAD = AcceptanceHead(HeadConfig(HIDDEN, depth=0, predicts="input_token"))


def counted(name):
    return sum(
        weight.numel() for weight in _step_weights(LanguageModel(tiny_model(CONFIGS[name], 0)))
    )


def total(name):
    return sum(weight.numel() for weight in tiny_model(CONFIGS[name], 0).parameters())


@pytest.mark.parametrize(
    ("name", "looked_up"),
    [
        ("llama", VOCAB_SIZE * HIDDEN),  # an untied embedding
        ("llama, tied", 0),  # the output embedding, which a step multiplies by
        ("gpt-neox", VOCAB_SIZE * HIDDEN),
        ("opt", (WINDOW + 2) * HIDDEN),  # learned positions, next to a tied embedding
    ],
)
def test_tables_with_one_row_per_step_do_not_count(name, looked_up):
    assert counted(name) == total(name) - looked_up


def test_the_share_is_of_multiply_adds_or_of_bytes_whichever_is_larger():
    """A float32 head next to a draft in half precision reads twice the bytes for its number of
    weights.
    """
    model = tiny_model(CONFIGS["llama, tied"], 0)
    share = (HIDDEN + 1) / total("llama, tied")
    assert counted_share(HEAD, LanguageModel(model.float())) == pytest.approx(share)
    assert counted_share(HEAD, LanguageModel(model.to(torch.bfloat16))) == pytest.approx(2 * share)
    # Half the bytes, as many multiply-adds
    assert counted_share(HEAD, LanguageModel(model.double())) == pytest.approx(share)
