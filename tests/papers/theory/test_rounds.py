"""Tokens per round by enumeration, and the order of the verification rules."""

import pytest
import torch

from specheads import verification
from specheads.papers.theory.chains import Chains, tokens_per_round
from specheads.papers.theory.rounds import accepted_error, most_tokens_per_round


def chains(seed=0, num_positions=5, vocab_size=3):
    return Chains.random(num_positions, vocab_size, torch.Generator().manual_seed(seed), sharpness=1.5)


def test_the_example_of_the_paper():
    """Sun et al. 2024: two tokens, two drafted; 10/9, 11/9 and 12/9 accepted tokens."""
    target, draft = torch.tensor([[1 / 3, 2 / 3], [2 / 3, 1 / 3]], dtype=torch.float64)
    known = Chains.constant(target, draft, 4)
    rules = verification.TokenVerification(), verification.BlockVerification()
    accepted = [tokens_per_round(rule, known, 2) - 1 for rule in rules]
    assert accepted == pytest.approx([10 / 9, 11 / 9], rel=1e-6)
    assert most_tokens_per_round(known, 2) - 1 == pytest.approx(12 / 9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_drafted", [1, 2, 4])
def test_rules_are_ordered_below_the_bound(seed, num_drafted):
    known = chains(seed)
    rules = verification.TokenVerification(), verification.BlockVerification()
    token, block = (tokens_per_round(rule, known, num_drafted) for rule in rules)
    most = most_tokens_per_round(known, num_drafted)
    assert token <= block + 1e-9 and block <= most + 1e-9
    if num_drafted == 1:
        assert token == pytest.approx(most, rel=1e-6)


def test_one_token_is_accepted_as_often_as_the_models_overlap():
    known = chains(3)
    overlap = torch.minimum(known.target[0, 0], known.draft[0, 0]).sum().item()
    assert tokens_per_round(verification.TokenVerification(), known, 1) == pytest.approx(1 + overlap)


def test_the_error_of_what_joint_verification_accepts():
    """Ratios 0.5 and 0.25 of one draft, 1.5 and more of the others: the first is the worst that passes at 0.4, both at 0.2."""
    target, draft = torch.tensor([[0.25, 0.75]] * 2, dtype=torch.float64), torch.tensor([[0.5, 0.5]] * 2, dtype=torch.float64)
    known = Chains.constant(target, draft, 3)
    assert accepted_error(known, 2, 0.4) == pytest.approx(1) and accepted_error(known, 2, 0.2) == pytest.approx(3)
    assert accepted_error(known, 2, 0.9) == pytest.approx(0)
