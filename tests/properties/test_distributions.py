"""What verification rules emit, enumerated on random models: lossless rules emit the target's
distribution, and biased ones the bias that they state.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from chains import block_after, difference, emitted_distribution, expected_accepted
from hypothesis import given
from hypothesis import strategies as st
from properties.strategies import probabilities, tables, tries
from trees import distributions_after, emitted, trees_of

from specheads.decoding.verification import (
    BlockVerification,
    TokenVerification,
    block_distribution,
    token_distribution,
)
from specheads.pair.sampling import accept_prob
from specheads.papers import BiasedVerification, MultiRound, SpecTr, TreeMatch
from specheads.papers.trees.verification import TreeBlock

ROUNDING = 1e-9
# (vocabulary, tokens drafted), (vocabulary, chains, their length)
CHAINS = [(2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (5, 1), (5, 2)]
TREES = [(2, 2, 1), (2, 2, 2), (2, 3, 1), (2, 3, 2), (3, 2, 1), (3, 2, 2), (3, 3, 1), (4, 3, 1)]
TREES += [(5, 2, 1)]
LOSSLESS = [TokenVerification(), BlockVerification(), BiasedVerification(0.0)]


@st.composite
def pairs(draw, shapes=CHAINS):
    """Return a target, a draft, and the rest of a shape."""
    vocab_size, *sizes = draw(st.sampled_from(shapes))
    return draw(tables(vocab_size)), draw(tables(vocab_size)), *sizes


@st.composite
def early_stops(draw):
    """Return a function of prefix and drafted tokens: the length at which a stopping rule ends the
    draft.
    """
    stops = draw(st.lists(st.booleans(), min_size=1, max_size=8))

    def length(prefix, tokens):
        place = len(prefix)
        for end, token in enumerate(tokens):
            if end and stops[place % len(stops)]:
                return end
            place += (token + 1) * 3**end
        return len(tokens)

    return length


@tries(2)
@given(st.sampled_from(LOSSLESS), pairs(), st.none() | early_stops())
def test_lossless_rules_emit_the_targets_distribution(rule, pair, stop):
    target, draft, num_drafted = pair
    emitted = emitted_distribution(rule, target, draft, num_drafted, min(num_drafted + 1, 4), stop)
    assert difference(emitted, target) < ROUNDING


@tries(2)
@given(pairs())
def test_blocks_accept_at_least_as_many_tokens_and_no_more_than_any_rule_can(pair):
    target, draft, num_drafted = pair
    token, block = (
        expected_accepted(distribution, target, draft, num_drafted)
        for distribution in (token_distribution, block_distribution)
    )
    best = sum(
        min(target.joint(tokens), draft.joint(tokens))
        for count in range(1, num_drafted + 1)
        for tokens in itertools.product(range(target.vocab_size), repeat=count)
    )
    assert token <= block + ROUNDING and block <= best + ROUNDING


@tries(2)
@given(
    st.sampled_from([*LOSSLESS, BiasedVerification(0.2), BiasedVerification(0.2, "uno")]),
    pairs(),
    st.booleans(),
)
def test_acceptance_falls_along_a_block_and_the_next_token_is_one_that_the_target_may_say(
    rule, pair, single
):
    target, draft, num_drafted = pair
    block, _ = block_after(target, draft, (), num_drafted)
    dtype = torch.float32 if single else torch.float64
    probs = block.draft_probs.to(dtype), block.target_probs.to(dtype)
    distribution = rule.distribution(block.of(block.tokens, *probs))
    ends = distribution.length_probs
    assert (ends >= -1e-6).all() and torch.allclose(
        ends.sum(dim=1).double(), torch.ones(len(ends)).double()
    )
    for count in range(num_drafted + 1):
        rows = torch.full((len(ends),), count)
        following = distribution.next_probs(rows)
        assert (following >= 0).all() and (following.sum(dim=1) > 0).all()
        num_accepted, next_token = distribution.decide(
            torch.linspace(0, 0.999, len(ends)).double(),
            torch.linspace(0.999, 0, len(ends)).double(),
        )
        chosen = block.target_probs[torch.arange(len(ends)), num_accepted].gather(
            1, next_token[:, None]
        )
        assert (chosen > 0).all()


@st.composite
def drafted_trees(draw):
    """Return a target, a draft and all trees that it may draft."""
    target, draft, count, length = draw(pairs(TREES))
    return target, draft, list(trees_of(draft, count, length, draw(st.booleans()))), length


@tries(2)
@given(st.sampled_from([TreeMatch(), MultiRound(), SpecTr()]), drafted_trees())
def test_rules_for_trees_emit_the_targets_distribution(rule, drafted):
    target, draft, trees, length = drafted
    assert sum(prob for _, prob in trees) == pytest.approx(1)
    assert difference(emitted(rule, target, draft, trees, length + 1), target) < ROUNDING


@given(
    st.sampled_from([TreeMatch(), MultiRound(), SpecTr()]),
    drafted_trees(),
    st.lists(probabilities(0, 0.999)),
)
def test_a_walk_goes_down_the_tree_to_a_token_that_the_target_may_say(rule, drafted, numbers):
    target, draft, trees, length = drafted
    uniforms = torch.tensor([*numbers, *[0.5] * (length + 1)], dtype=torch.float64)
    for nodes, _ in trees:
        target_probs, draft_probs = (
            distributions_after(model, nodes)[0] for model in (target, draft)
        )
        block = TreeBlock.of(replace(nodes, draft_probs=draft_probs), target_probs)
        accepted, next_token = rule.distribution(block).decide(
            uniforms[:length], uniforms[length : length + 1]
        )
        path = [node for node in accepted.tolist() if node >= 0]
        assert [nodes.parents[node] for node in path] == [-1, *path][: len(path)]
        assert target_probs[path[-1] + 1 if path else 0, next_token.item()] > 0
        assert all(
            target_probs[parent + 1, nodes.tokens[node]] > 0
            for node, parent in zip(path, [-1, *path], strict=False)
        )


def total_variation(target, other):
    return (target - other).clamp_min(0).sum()


@tries(2)
@given(pairs([(2, 1), (3, 1), (4, 1), (5, 1)]), probabilities())
def test_the_optimal_residual_has_the_least_bias_and_the_targets_no_less(pair, eps):
    target, draft, _ = pair
    opt, uno = (
        total_variation(
            emitted_distribution(BiasedVerification(eps, mode), target, draft, 1, 1), target(())
        ).item()
        for mode in ("opt", "uno")
    )
    accepted = accept_prob(target(()) + eps, draft(())) * draft(())
    rejected = (draft(()) - accepted).sum() / 2
    least = (target(()) - accepted).abs().sum() / 2 - rejected  # Yin et al. 2024, theorem 4
    assert opt == pytest.approx(least.item(), abs=ROUNDING)
    assert uno >= opt - ROUNDING
    bound = min(eps * target.vocab_size, total_variation(target(()), draft(())).item())
    assert opt <= bound + ROUNDING
