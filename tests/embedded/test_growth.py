import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.embedded.growth import grow


def model(layers, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).double()


@pytest.mark.parametrize("layers", [3, 4, 8])
def test_a_deeper_model_computes_the_same_until_it_trains(layers):
    trained, deeper = model(3, 0), model(layers, 1)
    ids = torch.arange(20)[None] % 30
    assert not torch.allclose(deeper(ids).logits, trained(ids).logits)
    grow(deeper, trained)
    assert torch.allclose(deeper(ids).logits, trained(ids).logits, atol=1e-12)


def test_further_layers_stand_between_those_they_copy_and_learn():
    trained, deeper = model(2, 0), model(5, 1)
    grow(deeper, trained)
    silent = [not layer.mlp.down_proj.weight.any() for layer in deeper.model.layers]
    assert silent == [False, True, True, False, True]
    ids = torch.arange(20)[None] % 30
    deeper(ids, labels=ids).loss.backward()
    assert all(layer.mlp.down_proj.weight.grad.any() for layer in deeper.model.layers)
    assert torch.equal(deeper.model.layers[2].mlp.up_proj.weight, trained.model.layers[0].mlp.up_proj.weight)
