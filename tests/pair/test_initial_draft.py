"""Drafts before training that are layers of the target."""

import pytest
import torch
from families import CONFIGS, VOCAB_SIZE, family_pair

from specheads import UserError
from specheads.pair.initial_draft import TargetLayers
from specheads.papers.layer_skip import without_layers

TOKENS = torch.arange(14)[None] % VOCAB_SIZE


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_of_some_layers_is_the_target_without_the_others(family):
    target = family_pair(family).target
    # The scale of its embeddings is float32 in one of them
    near = 1e-5 if family == "gemma2" else 1e-12
    for layers in ([0], [1]):
        model = TargetLayers(layers).make(target)
        expected = without_layers(target, [1 - layers[0]])(TOKENS).logits
        torch.testing.assert_close(model(TOKENS).logits, expected, atol=near, rtol=0)
    both = TargetLayers([0, 1]).make(target)
    torch.testing.assert_close(both(TOKENS).logits, target(TOKENS).logits, atol=near, rtol=0)
    assert not {weight.data_ptr() for weight in both.parameters()} & {
        weight.data_ptr() for weight in target.parameters()
    }


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_a_saved_initial_draft_is_an_ordinary_model(family, tmp_path):
    from transformers import AutoModelForCausalLM

    model = TargetLayers([1]).make(family_pair(family).target)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_layers_are_spread_from_the_first_to_the_last():
    assert TargetLayers(1).numbers(6) == [0] and TargetLayers(2).numbers(6) == [0, 5]
    assert TargetLayers(6).numbers(6) == list(range(6)) and TargetLayers(4).numbers(32) == [
        0,
        10,
        21,
        31,
    ]
    assert TargetLayers((3, 1)).numbers(6) == [3, 1]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([2], r"init_layers=\[2\] are not layers of a target that has the layers 0 to 1"),
        ([], "init_layers"),
        (3, "init_layers=3 must be an integer from 1 to 2"),
    ],
)
def test_layers_that_the_target_does_not_have_are_refused(layers, message):
    with pytest.raises(UserError, match=message):
        TargetLayers(layers).make(family_pair("llama").target)
