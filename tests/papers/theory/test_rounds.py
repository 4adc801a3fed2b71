"""Tokens per round by enumeration, and the order of the verification rules."""

import itertools

import pytest
import torch
from sympy import Matrix, Rational
from sympy.solvers.simplex import linprog

from benchmarks.papers.chains import Chains, every_draft, tokens_per_round
from benchmarks.papers.rounds import (
    _largest,
    accepted_error,
    kept_worth,
    most_tokens_per_round,
    tokens_after,
)
from specheads import verification
from specheads.papers.biased import BiasedVerification


def chains(seed=0, num_positions=5, vocab_size=3):
    return Chains.random(
        num_positions, vocab_size, torch.Generator().manual_seed(seed), sharpness=1.5
    )


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
    assert tokens_per_round(verification.TokenVerification(), known, 1) == pytest.approx(
        1 + overlap
    )


@pytest.mark.parametrize(("vocab_size", "num_drafted"), [(2, 2), (2, 3), (3, 2)])
def test_no_lossless_rule_emits_more_than_block_verification(vocab_size, num_drafted):
    """Sun et al. 2024, theorem 2, by a linear programme in exact fractions."""
    known = chains(7, num_drafted + 1, vocab_size)
    rules = verification.TokenVerification(), verification.BlockVerification(), None
    token, block, most = (tokens_after(rule, known, num_drafted, 1) for rule in rules)
    assert block == pytest.approx(most, abs=1e-12) and token < most - 1e-4
    assert block == pytest.approx(tokens_per_round(rules[1], known, num_drafted), abs=1e-12)


@pytest.mark.parametrize(("vocab_size", "num_drafted"), [(2, 2), (2, 3), (3, 2)])
def test_the_bound_is_what_a_draft_and_a_text_can_begin_alike_with(vocab_size, num_drafted):
    """Sun et al.

    2024, equations 35 to 37: the most over all joint distributions of a draft and a text of the
    target.
    """
    known = chains(7, num_drafted + 1, vocab_size)
    draft, block = every_draft(known, num_drafted)
    same = (block.tokens[:, None] == block.tokens).cumprod(dim=2).sum(dim=2).double()
    eye = torch.eye(len(draft)).double()
    ones = torch.ones(1, len(draft)).double()
    marginals = torch.cat([draft, block.drafted_probs()[1].prod(dim=1)])
    most = _largest(
        same.flatten(), torch.cat([torch.kron(eye, ones), torch.kron(ones, eye)]), marginals
    )
    assert 1 + most == pytest.approx(most_tokens_per_round(known, num_drafted), abs=1e-12)


@pytest.mark.parametrize("count", [1, 2])
def test_no_lossless_rule_keeps_any_text_more_often(count):
    """Sun et al.

    2024, lemmas 3 and 4: block verification keeps a text with probability `d p_i`, the most that is
    possible.
    """
    known = chains(7, 3, 2)
    block_rule = verification.BlockVerification()
    _, block = every_draft(known, 2)
    draft, target = (each[:, :count] for each in block.drafted_probs())
    for text in block.tokens[:, :count].unique(dim=0):
        begins = (block.tokens[:, :count] == text).all(dim=1)
        gains = torch.zeros(4, 2, dtype=torch.float64)
        gains[begins, count - 1] = 1
        row = begins.nonzero()[0].item()
        ratio = 1.0
        for place in range(count):
            ratio = min(1.0, ratio * (target[row, place] / draft[row, place]).item())
        expected = pytest.approx(draft[row].prod().item() * ratio, abs=1e-12)
        assert (
            kept_worth(block_rule, known, 2, gains) == expected
            and kept_worth(None, known, 2, gains) == expected
        )


def test_a_lossy_rule_is_no_part_of_the_programme():
    known = chains(7, 3, 2)
    lossy = BiasedVerification(0.2)
    assert tokens_after(lossy, known, 2, 1) > tokens_after(None, known, 2, 1) + 1e-3


def exact(num_positions, seed):
    """Return chains of two tokens in fractions of 16, which float64 has exactly: target and draft
    by place and last token.
    """
    counts = torch.randint(
        1, 16, (2, num_positions, 2), generator=torch.Generator().manual_seed(seed)
    )
    return Chains(*(torch.stack([each, 16 - each], dim=-1).double() / 16 for each in counts))


@pytest.mark.parametrize("seed", range(4))
def test_the_programme_is_that_of_the_output_distribution(seed):
    """Sun et al.

    2024, equation 6: kept tokens, the sampled one, and what the target adds have the target's
    distribution.

    The unknowns are the probabilities w(x, n, y) that x is drafted, n of its tokens are kept and y
    follows.
    """
    known = exact(3, seed)
    size = 2
    texts = list(itertools.product(range(2), repeat=size))

    def chance(model, text, start=0, last=0):
        value = Rational(1)
        for place, token in enumerate(text, start):
            value *= Rational(model[place, last, token].item())
            last = token
        return value

    unknowns = list(itertools.product(texts, range(size + 1), range(2)))
    rows = []
    totals = []
    for text in texts:  # the draft's distribution
        rows.append([int(drafted == text) for drafted, _, _ in unknowns])
        totals.append(chance(known.draft, text))
    for text in itertools.product(range(2), repeat=size + 1):  # the target's
        row = []
        for drafted, kept, token in unknowns:
            begins = (*drafted[:kept], token) == text[: kept + 1]
            row.append(chance(known.target, text[kept + 1 :], kept + 1, token) if begins else 0)
        rows.append(row)
        totals.append(chance(known.target, text))
    costs = [-kept for _, kept, _ in unknowns]
    both = Matrix(
        [*rows, *([-each for each in row] for row in rows)]
    )  # an equation as two inequalities
    value, _ = linprog(costs, both, [*totals, *(-each for each in totals)])
    assert 1 - float(value) == pytest.approx(tokens_after(None, known, size, 1), abs=1e-12)


@pytest.mark.parametrize(
    "rule", [verification.TokenVerification(), verification.BlockVerification()]
)
def test_tokens_after_two_rounds_are_those_of_all_texts(rule):
    """The same sum by the distribution of what a round emits: kept tokens and the next one."""
    known = chains(2, 6, 2)
    expected = 0.0
    for length, text, chance in first_rounds(rule, known, 2):
        expected += chance * (length + tokens_per_round(rule, known.after(length, text[-1]), 2))
    assert tokens_after(rule, known, 2, 2) == pytest.approx(expected, abs=1e-9)


def first_rounds(rule, known, num_drafted):
    """Yield the length, the text and the probability of all that a first round can emit."""
    probability, block = every_draft(known, num_drafted)
    distribution = rule.distribution(block)
    for row, tokens in enumerate(block.tokens.tolist()):
        for kept in range(num_drafted + 1):
            weights = distribution.next_probs(torch.full_like(block.lengths, kept))[row].double()
            for token, share in enumerate((weights / weights.sum()).tolist()):
                chance = probability[row] * distribution.length_probs[row, kept] * share
                yield kept + 1, [*tokens[:kept], token], chance.item()


def test_the_error_of_what_joint_verification_accepts():
    """Ratios 0.5 and 0.25 of one draft, 1.5 and more of the others: the first is the worst that
    passes at 0.4, both at 0.2.
    """
    target = torch.tensor([[0.25, 0.75]] * 2, dtype=torch.float64)
    draft = torch.tensor([[0.5, 0.5]] * 2, dtype=torch.float64)
    known = Chains.constant(target, draft, 3)
    assert accepted_error(known, 2, 0.4) == pytest.approx(1) and accepted_error(
        known, 2, 0.2
    ) == pytest.approx(3)
    assert accepted_error(known, 2, 0.9) == pytest.approx(0)
