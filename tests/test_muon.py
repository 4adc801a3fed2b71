import copy

import pytest
import torch
from fakes import tiny_llama

from specheads import muon
from specheads.muon import Muon, orthogonalized


@pytest.fixture
def model():
    return tiny_llama(11, seed=0).float().requires_grad_(True)


def moved(model, *optimizers, steps=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return list(model.parameters())


def test_weights_move_as_with_the_two_optimizers_of_torch(monkeypatch, model):
    """In bfloat16, the only type of torch's Muon."""
    monkeypatch.setattr(muon, "multiplied_dtype", lambda device: torch.bfloat16)
    other, before = copy.deepcopy(model), copy.deepcopy(model)
    matrices = [w for name, w in other.named_parameters() if w.ndim == 2 and "embed" not in name and "lm_head" not in name]
    rest = [w for name, w in other.named_parameters() if w.ndim != 2 or "embed" in name or "lm_head" in name]
    assert len(matrices) == 7 and len(rest) == 5
    theirs = (
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0),
    )
    for weight, same, old in zip(
        moved(model, Muon(model, 0.02, 0.003, 0.01)), moved(other, *theirs), before.parameters(), strict=True
    ):
        assert (weight - same).abs().max() < 0.05 * (same - old).abs().max()


def test_singular_vectors_stay_and_values_come_near_one():
    torch.manual_seed(0)
    matrix = torch.randn(3, 30, 12, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = left.mT @ orthogonalized(matrix) @ right.mT
    diagonal = values.diagonal(dim1=1, dim2=2)
    assert torch.allclose(values, torch.diag_embed(diagonal), atol=1e-9)
    assert diagonal.min() > 0.6 and diagonal.max() < 1.3


def test_a_state_that_was_saved_continues_to_the_same_weights(model):
    optimizer = Muon(model, 0.02, 0.003)
    moved(model, optimizer, steps=2)
    copied = copy.deepcopy(model)
    resumed = Muon(copied, 0.02, 0.003)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for weight, other in zip(moved(model, optimizer, seed=2), moved(copied, resumed, seed=2), strict=True):
        assert torch.equal(weight, other)


def test_weights_without_a_gradient_stay(model):
    model.model.embed_tokens.requires_grad_(False)
    optimizer, before = Muon(model, 0.02, 0.003, 0.1), copy.deepcopy(model)
    first = model.model.layers[0].mlp.up_proj.weight
    first.grad = torch.ones_like(first)
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert sum(changed) == 1
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(changed) - 1
