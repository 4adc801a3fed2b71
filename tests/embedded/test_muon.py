import copy

import pytest
import torch

from specheads.embedded.muon import Muon, orthogonalized

SHAPES = [(40, 20), (20, 40), (40, 20), (16, 16)]


@pytest.fixture
def matrices():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def moved(matrices, optimizer, steps=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        optimizer.step()
    return matrices


def test_in_bfloat16_it_moves_matrices_as_torch_does(matrices):
    others = [torch.nn.Parameter(matrix.detach().clone()) for matrix in matrices]
    theirs = torch.optim.Muon(others, lr=0.02, weight_decay=0.01, momentum=0.95, adjust_lr_fn="original")
    moved(matrices, Muon(matrices, lr=0.02, weight_decay=0.01))
    moved(others, theirs)
    for matrix, other in zip(matrices, others, strict=True):
        assert torch.allclose(matrix, other, atol=1e-3)  # a step moves a number by 0.002 and more


def test_singular_vectors_stay_and_values_come_near_one():
    torch.manual_seed(0)
    matrix = torch.randn(3, 30, 12, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = left.mT @ orthogonalized(matrix) @ right.mT
    diagonal = values.diagonal(dim1=1, dim2=2)
    assert torch.allclose(values, torch.diag_embed(diagonal), atol=1e-9)
    assert diagonal.min() > 0.6 and diagonal.max() < 1.3


def test_momentum_is_part_of_its_state(matrices):
    optimizer = Muon(matrices, lr=0.02, dtype=torch.float64)
    moved(matrices, optimizer, steps=2)
    copies = [torch.nn.Parameter(matrix.detach().clone()) for matrix in matrices]
    resumed = Muon(copies, lr=0.02, dtype=torch.float64)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for matrix, other in zip(moved(matrices, optimizer, 1), moved(copies, resumed, 1), strict=True):
        assert torch.equal(matrix, other)


def test_a_matrix_without_a_gradient_stays(matrices):
    before = matrices[1].detach().clone()
    matrices[0].grad = torch.ones(SHAPES[0])
    Muon(matrices, lr=0.02, weight_decay=0.1).step()
    assert torch.equal(matrices[1], before)
