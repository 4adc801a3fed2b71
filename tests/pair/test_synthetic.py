import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specheads import load_pair
from specheads.errors import UserError
from specheads.pair.synthetic import SHAPES

# Parameters in billions, from the models' cards.
SIZES = {"llama3.2-1b": 1.24, "llama3.1-8b": 8.03}


@pytest.mark.parametrize("name", SIZES)
def test_shapes_have_the_real_number_of_weights(name):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[name]))
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(
        SIZES[name], abs=0.005
    )


def test_a_synthetic_pair_is_a_pair():
    pair = load_pair("synthetic-tiny", device="cpu")
    again = load_pair("synthetic-tiny", device="cpu")
    assert pair.target.dtype == torch.bfloat16
    assert all(
        torch.equal(a, b)
        for a, b in zip(pair.target.parameters(), again.target.parameters(), strict=True)
    )
    assert pair.encode("7 12 255").tolist() == [7, 12, 255]
    assert pair.decode([3, 1]) == "3 1"
    assert "random weights" in pair.draft_revision


def test_an_unknown_shape_is_refused():
    with pytest.raises(UserError, match="synthetic:llama9.*synthetic:llama3.1-8b"):
        load_pair(draft="synthetic:llama9", target="synthetic:llama9", device="cpu")
