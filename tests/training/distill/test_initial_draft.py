"""Drafts before training: layers of the target, and random weights."""

import pytest
import torch
from families import CONFIGS, VOCAB_SIZE, family_pair

from specheads import UserError
from specheads.papers.layer_skip import without_layers
from specheads.training.distill.initial_draft import RandomDraft, TargetLayers, evenly_spread, with_layers, with_random_weights

TOKENS = torch.arange(14)[None] % VOCAB_SIZE


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_of_some_layers_is_the_target_without_the_others(family):
    target = family_pair(family).target
    near = 1e-5 if family == "gemma2" else 1e-12  # the scale of its embeddings is float32 in one of them
    for layers in ([0], [1]):
        model = with_layers(target, layers)
        expected = without_layers(target, [1 - layers[0]])(TOKENS).logits
        torch.testing.assert_close(model(TOKENS).logits, expected, atol=near, rtol=0)
    both = with_layers(target, [0, 1])
    torch.testing.assert_close(both(TOKENS).logits, target(TOKENS).logits, atol=near, rtol=0)
    assert not {weight.data_ptr() for weight in both.parameters()} & {weight.data_ptr() for weight in target.parameters()}


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_a_saved_initial_draft_is_an_ordinary_model(family, tmp_path):
    from transformers import AutoModelForCausalLM

    model = with_layers(family_pair(family).target, [1])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=1e-5)


def test_layers_are_spread_from_the_first_to_the_last():
    assert evenly_spread(6, 1) == [0] and evenly_spread(6, 2) == [0, 5] and evenly_spread(6, 6) == list(range(6))
    assert evenly_spread(32, 4) == [0, 10, 21, 31]
    with pytest.raises(UserError, match="init_layers=7 must be an integer from 1 to 6"):
        evenly_spread(6, 7)


def test_a_random_draft_has_the_sizes_that_are_asked_for():
    target = family_pair("gemma2").target
    first, same, other = (with_random_weights(target, {"num_hidden_layers": 3, "hidden_size": 16}, seed) for seed in (0, 0, 1))
    assert first.config.num_hidden_layers == 3 and first(TOKENS).logits.shape == (1, 14, VOCAB_SIZE)
    weights = [model.get_input_embeddings().weight for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda target: with_layers(target, [2]),
            r"init_layers=\[2\] are not layers of LlamaForCausalLM, which has the layers 0 to 1",
        ),
        (lambda target: with_layers(target, []), "init_layers"),
        (lambda target: with_random_weights(target, {"depth": 3}, 0), "init_config.depth is no key of LlamaConfig"),
        (lambda target: with_random_weights(target, {"num_attention_heads": 0}, 0), "init_config=.*makes no model"),
    ],
)
def test_impossible_initial_drafts_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make(family_pair("llama").target)


def test_initial_drafts_have_descriptive_names():
    target = family_pair("llama").target
    assert (
        TargetLayers().name == "the target's layers spread evenly" and TargetLayers((0, 1)).name == "the target's layers [0, 1]"
    )
    assert [TargetLayers(layers).make(target).config.num_hidden_layers for layers in (None, 2, (1,))] == [1, 2, 1]
    draft = RandomDraft({"num_hidden_layers": 3})
    assert draft.name == "fresh: num_hidden_layers=3" and draft.make(target).config.num_hidden_layers == 3
