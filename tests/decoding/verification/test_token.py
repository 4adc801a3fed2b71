"""Token verification; what all rules share is in test_rules.py."""

import pytest
import torch

from specheads.decoding.verification import Block, token_distribution, token_verification


def test_point_masses_compare_prefixes():
    target = torch.eye(4)[torch.tensor([[1, 2, 3, 0]])]
    draft = torch.eye(4)[torch.tensor([[1, 2, 0]])]
    verdict = token_verification(torch.tensor([[1, 2, 0]]), draft, target, torch.Generator().manual_seed(0))
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == (2, 3)


def test_each_token_passes_with_the_ratio_of_its_probabilities():
    draft = torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.4, 0.4]]])
    target = torch.tensor([[[0.25, 0.5, 0.25], [0.9, 0.1, 0.0], [1.0, 0.0, 0.0]]])
    distribution = token_distribution(Block.of(torch.tensor([[0, 1]]), draft, target))
    assert distribution.survival[0].tolist() == pytest.approx([0.5, 0.125])
    assert distribution.length_probs[0].tolist() == pytest.approx([0.5, 0.375, 0.125])
    for accepted, residual in enumerate(([0, 0.25, 0], [0.7, 0, 0], [1, 0, 0])):
        assert distribution.next_probs(torch.tensor([accepted]))[0].tolist() == pytest.approx(residual)


def test_a_residual_emptied_by_rounding_falls_back_to_the_target():
    target = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    draft = target[:, :1].clone()
    draft[0, 0, 0] += 1e-7
    distribution = token_distribution(Block.of(torch.tensor([[0]]), draft, target))
    assert distribution.survival.item() < 1
    assert distribution.next_probs(torch.tensor([0]))[0].tolist() == target[0, 0].tolist()


def test_shapes_that_do_not_fit_are_refused():
    distributions = torch.full((1, 3, 4), 0.25)
    with pytest.raises(ValueError, match="3 drafted tokens need 3 distributions of the draft and 4 of the target"):
        token_verification(torch.zeros(1, 3, dtype=torch.long), distributions, distributions, torch.Generator())


def test_batches_that_differ_are_refused():
    distributions = torch.full((2, 3, 4), 0.25)
    with pytest.raises(ValueError, match="do not agree"):
        token_verification(torch.zeros(1, 2, dtype=torch.long), distributions, distributions, torch.Generator())
