"""Expected rejections: by enumeration of all texts, by simulation, and the line of biased
verification.
"""

import itertools
from math import inf

import pytest
import torch

from benchmarks.papers.chains import Chains, residual, total_variation
from benchmarks.papers.rejections import (
    after_batch,
    expected_rejections,
    pareto_front,
    simulated_rejections,
)


def chains(num_positions=50, vocab_size=7, seed=0):
    return Chains.random(num_positions, vocab_size, torch.Generator().manual_seed(seed))


def test_one_draft_is_rejected_by_the_total_variation():
    """Summed over all texts, weighted by the target's probability of what came before."""
    small = chains(4, 3)
    total = 0.0
    for length in range(4):
        for text in itertools.product(range(3), repeat=length):
            probability = 1.0
            last = 0
            for place, token in enumerate(text):
                probability *= small.target[place, last, token].item()
                last = token
            total += (
                probability
                * total_variation(small.target[length, last], small.draft[length, last]).item()
            )
    assert expected_rejections(small) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_what_is_rejected_and_what_is_accepted_make_the_target(num_drafts):
    """By enumeration of the sampled tokens and of each one's outcome."""
    generator = torch.Generator().manual_seed(3)
    target, draft = torch.randn((2, 4), generator=generator, dtype=torch.float64).softmax(dim=-1)
    accepted = torch.zeros(4, dtype=torch.float64)
    replaced = torch.zeros(4, dtype=torch.float64)
    for tokens in itertools.product(range(4), repeat=num_drafts):
        chance = draft[list(tokens)].prod()
        left = target
        for token in tokens:
            passes = min(1.0, (left[token] / draft[token]).item())
            accepted[token] += chance * passes
            chance = chance * (1 - passes)
            left = residual(left, draft)
        replaced += chance * left
    torch.testing.assert_close((accepted, replaced), after_batch(target, draft, num_drafts))
    torch.testing.assert_close(accepted + replaced, target)


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 8])
def test_a_million_simulated_tokens_agree(num_drafts):
    """Within 5 standard errors: by chance not once in a million."""
    known = chains()
    counts = simulated_rejections(
        known, num_drafts, 20_000, torch.Generator().manual_seed(1)
    ).double()
    error = counts.std().item() / len(counts) ** 0.5
    assert abs(counts.mean().item() - expected_rejections(known, num_drafts)) < 5 * error


def test_more_drafts_are_rejected_less_down_to_a_limit():
    known = chains(10)
    rejections = [expected_rejections(known, number) for number in (1, 2, 4, 8, 16)]
    assert rejections == sorted(rejections, reverse=True) and rejections[0] > rejections[-1] * 1.05
    limit = expected_rejections(known, inf)
    assert 0 < limit < rejections[-1]  # a draft that goes on alone is still rejected
    assert expected_rejections(known, 2000) == pytest.approx(limit, rel=1e-3)


def test_of_infinitely_many_drafts_those_tokens_are_missing_that_are_never_proposed():
    target, draft = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.6, 0.4]], dtype=torch.float64)
    many, all_of_them = (after_batch(target, draft, number)[1] for number in (500, inf))
    torch.testing.assert_close(many, all_of_them)
    assert all_of_them.tolist() == [0.5, 0, 0]


def test_equal_models_are_never_rejected():
    known = chains()
    same = Chains(known.target, known.target)
    assert expected_rejections(same) == expected_rejections(same, 4) == 0
    assert simulated_rejections(same, 2, 10, torch.Generator().manual_seed(0)).sum() == 0


def test_biased_acceptance_trades_rejections_for_bias_one_to_one():
    section = pareto_front(torch.Generator().manual_seed(2))
    eps, rejections, biases, sums, of_uno = zip(*section.rows, strict=True)
    assert sums == pytest.approx([sums[0]] * len(eps)) and biases[0] == pytest.approx(0, abs=1e-12)
    assert rejections[-1] == pytest.approx(0, abs=1e-12) and list(rejections) == sorted(
        rejections, reverse=True
    )
    assert (
        all(uno >= opt - 1e-12 for uno, opt in zip(of_uno, biases, strict=True))
        and of_uno[3] > biases[3]
    )
    assert all(claim.outcome == "held" for claim in section.claims)
