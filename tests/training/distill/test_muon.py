"""Muon moves matrices of layers as torch's does, and AdamW the other weights.

A matrix nearly orthogonal is what it makes.
"""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.pair.draft_vocabulary import keep_tokens
from specheads.training.distill.muon import MuonAndAdamW, matrices_of_layers, orthogonalized


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12)])
def test_singular_values_come_close_to_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalized(matrix * 1e-3, torch.float32)
    found = torch.linalg.svdvals(result)
    assert values.max() / values.min() > 1.5
    assert found.min() > 0.65
    assert found.max() < 1.25
    inner = left.T @ result @ right.T  # the same singular vectors
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-4


def test_a_matrix_of_zeros_stays():
    assert torch.equal(orthogonalized(torch.zeros(3, 4), torch.float32), torch.zeros(3, 4))


def test_steps_are_those_of_torch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 5))
    other = copy.deepcopy(model)
    optimizer = MuonAndAdamW(
        model.parameters(), [model[0].weight, model[2].weight], 1e-2, 0.1, torch.bfloat16
    )
    muon = torch.optim.Muon(
        [other[0].weight, other[2].weight], 1e-2, 0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW([other[0].bias, other[2].bias], 1e-2, weight_decay=0.1)
    for _ in range(4):
        inputs = torch.randn(8, 12)

        def closure(model=model, inputs=inputs):
            model.zero_grad()
            loss = model(inputs).square().sum()
            loss.backward()
            return loss

        expected = closure(other)
        muon.step()
        adamw.step()
        assert optimizer.step(closure).item() == pytest.approx(expected.item(), rel=1e-5)
    for weight, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weight, theirs, rtol=1e-5, atol=1e-6)


def test_a_loaded_state_goes_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))

    def step(model, optimizer, seed):
        model.zero_grad()
        model(
            torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        ).square().sum().backward()
        optimizer.step()

    def made(model):
        return MuonAndAdamW(model.parameters(), [model[0].weight], 1e-2, 0.0, torch.float32)

    optimizer = made(model)
    step(model, optimizer, 0)
    again = copy.deepcopy(model)
    state = copy.deepcopy(optimizer.state_dict())
    resumed = made(again)
    resumed.load_state_dict(state)
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(again, resumed, seed)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_the_output_and_vectors_are_no_matrices_of_layers(cut, tied):
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 16,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))
    if cut:
        keep_tokens(model, torch.tensor([1, 3, 4, 9]))
    names = {id(weight): name for name, weight in model.named_parameters()}
    chosen = {names[id(weight)] for weight in matrices_of_layers(model)}
    assert chosen == {
        name for name in names.values() if name.startswith("model.layers") and "norm" not in name
    }
