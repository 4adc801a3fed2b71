"""Token verification; what all rules share is in test_rules.py."""

import pytest
import torch

from specheads.decoding.verification import Block, token_distribution


def test_each_token_passes_with_the_ratio_of_its_probabilities():
    draft = torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.4, 0.4]]])
    target = torch.tensor([[[0.25, 0.5, 0.25], [0.9, 0.1, 0.0], [1.0, 0.0, 0.0]]])
    distribution = token_distribution(Block.of(torch.tensor([[0, 1]]), draft, target))
    assert distribution.survival[0].tolist() == pytest.approx([0.5, 0.125])
    assert distribution.length_probs[0].tolist() == pytest.approx([0.5, 0.375, 0.125])
    for accepted, residual in enumerate(([0, 0.25, 0], [0.7, 0, 0], [1, 0, 0])):
        assert distribution.next_probs(torch.tensor([accepted]))[0].tolist() == pytest.approx(
            residual
        )


def test_a_residual_emptied_by_rounding_falls_back_to_the_target():
    target = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    draft = target[:, :1].clone()
    draft[0, 0, 0] += 1e-7
    distribution = token_distribution(Block.of(torch.tensor([[0]]), draft, target))
    assert distribution.survival.item() < 1
    assert distribution.next_probs(torch.tensor([0]))[0].tolist() == target[0, 0].tolist()


@pytest.mark.parametrize(
    ("draft", "target"),
    [((1, 2, 4), (1, 2, 4)), ((2, 2, 4), (1, 3, 4)), ((1, 2, 5), (1, 3, 4))],
)
def test_distributions_that_do_not_fit_the_tokens_are_refused(draft, target):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        Block.of(torch.zeros(1, 2, dtype=torch.long), torch.ones(draft), torch.ones(target))
    assert (
        str(raised.value)
        == f"shapes [(1, 2), {draft}, {target}] of tokens and distributions do not agree; expected"
        " (B, K), (B, K, V) and (B, K + 1, V)"
    )


def test_a_token_is_accepted_at_uniform_numbers_below_its_survival():
    draft = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    target = torch.tensor([[[0.25, 0.75], [0.25, 0.75], [0.5, 0.5]]])
    distribution = token_distribution(Block.of(torch.tensor([[0, 0]]), draft, target))
    assert distribution.survival.tolist() == [[0.5, 0.25]]
    below = 2.0**-30
    numbers = torch.tensor(
        [0.0, 0.25 - below, 0.25, 0.5 - below, 0.5, 1 - below], dtype=torch.float64
    )
    accepted = [distribution.decide(number[None], number[None])[0].item() for number in numbers]
    assert accepted == [2, 2, 1, 1, 0, 0]
