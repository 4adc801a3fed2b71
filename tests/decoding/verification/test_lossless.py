"""What comes out follows the target's distribution: by enumeration through the distributions that decoding samples from."""

import itertools
import random

import pytest
import torch
from chains import Model, difference, emitted_distribution, expected_accepted, greedy_block_distribution

from specheads.decoding.verification import BlockVerification, TokenVerification, block_distribution, token_distribution
from specheads.papers import BiasedVerification

SHAPES = [(2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2)]


def pairs(vocab_size, count):
    """Return random pairs of models, half of them adversarial."""
    return [(Model(vocab_size, 2 * n, n % 2 == 1), Model(vocab_size, 2 * n + 1, n % 4 > 1)) for n in range(count)]


@pytest.mark.parametrize(("vocab_size", "num_drafted"), SHAPES)
@pytest.mark.parametrize("rule", [TokenVerification(), BlockVerification(), BiasedVerification(0.0)], ids=lambda r: r.label)
def test_the_emitted_tokens_follow_the_target(rule, vocab_size, num_drafted):
    assert rule.lossless
    for target, draft in pairs(vocab_size, 8):
        assert difference(emitted_distribution(rule, target, draft, num_drafted, num_drafted + 1), target) < 1e-9


@pytest.mark.parametrize(("vocab_size", "num_drafted"), [(2, 2), (2, 3), pytest.param(3, 2, marks=pytest.mark.full)])
@pytest.mark.parametrize("num_levels", [1, 4])
def test_nested_rounds_of_greedy_blocks_follow_the_target(num_levels, vocab_size, num_drafted):
    for target, draft in pairs(vocab_size, 4 if vocab_size == 2 else 2):
        assert difference(emitted_distribution(num_levels, target, draft, num_drafted, 2 * num_drafted + 2), target) < 1e-9


@pytest.mark.full
def test_nested_rounds_of_long_greedy_blocks_follow_the_target():
    target, draft = Model(2, 5), Model(2, 6)
    assert difference(emitted_distribution(3, target, draft, 4, 10), target) < 1e-9


def test_dropping_the_levels_would_be_noticed():
    """Rounds that do not nest are off by about 0.02 in total variation."""
    target, draft = Model(2, 0), Model(2, 1)

    class Forgetful(BlockVerification):
        def distribution(self, block):
            return greedy_block_distribution(block)

    assert difference(emitted_distribution(Forgetful(), target, draft, 3, 4), target) > 1e-3


def stop_early(prefix, tokens):
    """Return a length that depends on what was drafted: a stopping rule's."""
    return next((i for i in range(1, len(tokens)) if random.Random(repr((prefix, tokens[:i]))).random() < 0.4), len(tokens))


@pytest.mark.parametrize("rule", [TokenVerification(), BlockVerification()], ids=lambda r: r.label)
def test_drafts_that_stop_by_what_was_drafted(rule):
    for target, draft in pairs(2, 4):
        assert difference(emitted_distribution(rule, target, draft, 3, 5, stop_early), target) < 1e-9


@pytest.mark.parametrize("num_levels", [1, 3])
def test_greedy_blocks_of_lengths_that_change_between_rounds(num_levels):
    target, draft = Model(2, 3), Model(2, 4)
    actual = emitted_distribution(num_levels, target, draft, 3, 6, lambda prefix, tokens: 3 if len(prefix) % 2 == 0 else 1)
    assert difference(actual, target) < 1e-9


def test_greedy_blocks_need_to_know_the_length_beforehand():
    target, draft = Model(2, 0), Model(2, 1)
    assert difference(emitted_distribution(2, target, draft, 3, 5, stop_early, planned=False), target) < 1e-9
    assert difference(emitted_distribution(2, target, draft, 3, 5, stop_early, planned=True), target) > 1e-4


class Same:
    """The same distribution after every prefix."""

    def __init__(self, *probs):
        self.probs, self.vocab_size = torch.tensor(probs, dtype=torch.float64), len(probs)

    def __call__(self, prefix):
        return self.probs

    joint = Model.joint


@pytest.mark.parametrize(
    ("distribution_of", "ninths"), [(token_distribution, 10), (block_distribution, 11), (greedy_block_distribution, 12)]
)
def test_the_worked_example(distribution_of, ninths):
    actual = expected_accepted(distribution_of, Same(1 / 3, 2 / 3), Same(2 / 3, 1 / 3), 2)
    assert actual == pytest.approx(ninths / 9, abs=1e-12)


@pytest.mark.parametrize(("vocab_size", "num_drafted"), SHAPES)
def test_greedy_blocks_reach_the_optimal_transport_value(vocab_size, num_drafted):
    for target, draft in pairs(vocab_size, 8):
        best = sum(
            min(target.joint(tokens), draft.joint(tokens))
            for count in range(1, num_drafted + 1)
            for tokens in itertools.product(range(vocab_size), repeat=count)
        )
        assert expected_accepted(greedy_block_distribution, target, draft, num_drafted) == pytest.approx(best, abs=1e-9)


def test_blocks_accept_at_least_as_many_tokens_on_a_thousand_pairs():
    more = 0
    for seed in range(1000):
        vocab_size, num_drafted = ((2, 3), (3, 2), (2, 2), (4, 2))[seed % 4]
        target, draft = Model(vocab_size, 2 * seed, seed % 3 == 0), Model(vocab_size, 2 * seed + 1, seed % 5 == 0)
        token, block, greedy = (
            expected_accepted(distribution, target, draft, num_drafted)
            for distribution in (token_distribution, block_distribution, greedy_block_distribution)
        )
        assert greedy >= block - 1e-12
        assert block >= token - 1e-12
        more += block > token + 1e-6
    assert more > 500
