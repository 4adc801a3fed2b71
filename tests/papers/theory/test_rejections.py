"""Expected rejections: by enumeration of all texts, by simulation, and the line of biased verification."""

import itertools

import pytest
import torch

from specheads.papers.theory.rejections import (
    Chains,
    biased_step,
    expected_rejections,
    limit_of_rejections,
    rejected,
    residual,
    simulated_rejections,
    total_variation,
)


def chains(num_positions=50, vocab_size=7, seed=0):
    return Chains.random(num_positions, vocab_size, torch.Generator().manual_seed(seed))


def test_one_draft_is_rejected_by_the_total_variation():
    """Summed over all texts, weighted by the target's probability of what came before."""
    small, total = chains(4, 3), 0.0
    for length in range(4):
        for text in itertools.product(range(3), repeat=length):
            probability, last = 1.0, 0
            for place, token in enumerate(text):
                probability *= small.target[place, last, token].item()
                last = token
            total += probability * total_variation(small.target[length, last], small.draft[length, last]).item()
    assert expected_rejections(small) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_what_is_rejected_and_what_is_accepted_make_the_target(num_drafts):
    """By enumeration of the sampled tokens and of each one's outcome."""
    generator = torch.Generator().manual_seed(3)
    target, draft = torch.randn((2, 4), generator=generator, dtype=torch.float64).softmax(dim=-1)
    accepted, replaced = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for tokens in itertools.product(range(4), repeat=num_drafts):
        chance, left = draft[list(tokens)].prod(), target
        for token in tokens:
            passes = min(1.0, (left[token] / draft[token]).item())
            accepted[token] += chance * passes
            chance, left = chance * (1 - passes), residual(left, draft)
        replaced += chance * left
    torch.testing.assert_close(replaced, rejected(target, draft, num_drafts))
    torch.testing.assert_close(accepted + replaced, target)


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 8])
def test_a_million_simulated_tokens_agree(num_drafts):
    """Within 5 standard errors: by chance not once in a million."""
    known = chains()
    counts = simulated_rejections(known, num_drafts, 20_000, torch.Generator().manual_seed(1)).double()
    error = counts.std().item() / len(counts) ** 0.5
    assert abs(counts.mean().item() - expected_rejections(known, num_drafts)) < 5 * error


def test_more_drafts_are_rejected_less_down_to_a_limit():
    known = chains()
    rejections = [expected_rejections(known, number) for number in (1, 2, 4, 8, 16)]
    assert rejections == sorted(rejections, reverse=True) and rejections[0] > rejections[-1] * 1.05
    limit = limit_of_rejections(known)
    assert 0 < limit < rejections[-1]  # a draft that goes on alone is still rejected


def test_equal_models_are_never_rejected():
    known = chains()
    same = Chains(known.target, known.target)
    assert expected_rejections(same) == expected_rejections(same, 4) == 0
    assert simulated_rejections(same, 2, 10, torch.Generator().manual_seed(0)).sum() == 0


def test_biased_acceptance_trades_rejections_for_bias_one_to_one():
    generator = torch.Generator().manual_seed(2)
    target, draft = torch.randn((2, 6), generator=generator, dtype=torch.float64).softmax(dim=-1)
    distance = total_variation(target, draft).item()
    steps = [biased_step(target, draft, eps) for eps in (0.0, 0.01, 0.05, 0.1, 1.0)]
    for step in steps:
        assert step.rejection + step.bias_opt == pytest.approx(distance)
        assert step.bias_uno >= step.bias_opt - 1e-12
    assert steps[0].rejection == pytest.approx(distance) and steps[-1].rejection == pytest.approx(0, abs=1e-12)
    assert [step.rejection for step in steps] == sorted((step.rejection for step in steps), reverse=True)
    assert steps[2].bias_uno > steps[2].bias_opt
