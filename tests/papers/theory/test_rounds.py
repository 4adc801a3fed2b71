"""Tokens per round: formulas against each other and against enumeration, and the order of the verification rules."""

import pytest
import torch

from specheads import papers, verification
from specheads.papers.theory.rejections import Chains
from specheads.papers.theory.rounds import best_length, enumerated_tokens_per_round, most_tokens_per_round, tokens_per_round


def chains(seed=0, num_positions=5, vocab_size=3):
    return Chains.random(num_positions, vocab_size, torch.Generator().manual_seed(seed), sharpness=1.5)


def constant(target, draft, num_positions=4):
    """The same two distributions everywhere."""
    return Chains(*(torch.tensor(each).double().expand(num_positions, len(each), -1) for each in (target, draft)))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
def test_the_formula_is_the_closed_form(acceptance):
    for count in (0, 1, 4, 9):
        assert tokens_per_round(acceptance, count) == pytest.approx((1 - acceptance ** (count + 1)) / (1 - acceptance))
    assert tokens_per_round(1.0, 4) == 5


def test_the_best_length_is_where_the_speed_is_largest():
    assert best_length(0.0, 0.1)[0] == 1 and best_length(1.0, 0.1, longest=30)[0] == 30
    lengths = [best_length(rate, 0.1)[0] for rate in (0.3, 0.5, 0.7, 0.9)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert best_length(0.7, 0.05)[0] >= best_length(0.7, 0.2)[0]
    best = best_length(0.8, 1 / 7)[0]
    speeds = [tokens_per_round(0.8, count) / (7 + count) for count in range(30)]
    assert speeds[best] == max(speeds)


def test_the_example_of_the_paper():
    """Sun et al. 2024: two tokens, two drafted; 10/9, 11/9 and 12/9 accepted tokens."""
    known = constant((1 / 3, 2 / 3), (2 / 3, 1 / 3))
    rules = verification.TokenVerification(), verification.BlockVerification(), papers.GreedyBlockVerification()
    accepted = [enumerated_tokens_per_round(rule, known, 2) - 1 for rule in rules]
    assert accepted == pytest.approx([10 / 9, 11 / 9, 12 / 9], rel=1e-6)
    assert most_tokens_per_round(known, 2) - 1 == pytest.approx(12 / 9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_drafted", [1, 2, 4])
def test_rules_are_ordered_and_the_greedy_block_reaches_the_bound(seed, num_drafted):
    known = chains(seed)
    token, block, greedy = (
        enumerated_tokens_per_round(rule, known, num_drafted)
        for rule in (
            verification.TokenVerification(),
            verification.BlockVerification(),
            papers.GreedyBlockVerification(),
        )
    )
    most = most_tokens_per_round(known, num_drafted)
    assert token <= block + 1e-9 and block <= greedy + 1e-9 and greedy == pytest.approx(most, rel=1e-6)
    if num_drafted == 1:
        assert token == pytest.approx(most, rel=1e-6)


def test_one_token_is_accepted_as_often_as_the_models_overlap():
    known = chains(3)
    overlap = torch.minimum(known.target[0, 0], known.draft[0, 0]).sum().item()
    assert enumerated_tokens_per_round(verification.TokenVerification(), known, 1) == pytest.approx(1 + overlap)
