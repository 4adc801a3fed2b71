"""Stopping rules on any features and outcomes: lengths stay within their bounds, and states stay
finite.
"""

import copy
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from properties.strategies import HIDDEN, stopping_rules, tries
from torch.utils._pytree import tree_leaves

from specheads.decoding.stopping import FixedLength, StoppingRule
from specheads.decoding.stopping.rule import unless
from specheads.decoding.stopping.survival import SurvivalRule

CPU = torch.device("cpu")
BATCH = 3
# As a softmax may round them, down to a probability that is 0 and an entropy below it.
probs = st.sampled_from([0.0, 1e-300, 1e-38, 1e-7, 0.3, 0.5, 1 - 1e-7, 1.0]) | st.floats(0, 1)
entropies = st.sampled_from([-1e-6, 0.0, 0.7, 11.8]) | st.floats(0, 12)
scales = st.sampled_from([0.0, 1.0, 100.0])


def rows(values):
    return st.lists(values, min_size=BATCH, max_size=BATCH)


@st.composite
def steps(draw):
    """Return the features of a drafted token in each row, (B, ...)."""
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    largest = torch.tensor(draw(rows(probs)), dtype=dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    states = draw(scales) * torch.randn(2, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    features = {
        "max_prob": largest,
        "draft_prob": torch.minimum(largest, torch.tensor(draw(rows(probs)), dtype=dtype)),
    }
    return features | {
        "entropy": torch.tensor(draw(rows(entropies)), dtype=dtype),
        "hidden": states[0],
        "embedding": states[1],
    }


@st.composite
def rounds(draw):
    """Return the features of a round's steps, where the draft is cut in each row, and how many
    tokens are accepted at most.
    """
    few = st.integers(0, 9)
    return (
        draw(st.lists(steps(), min_size=1, max_size=4)),
        torch.tensor(draw(rows(few))),
        torch.tensor(draw(rows(few))),
    )


def check_finite(state):
    assert all(leaf.isfinite().all() for leaf in tree_leaves(state)), state


def play_round(rule: StoppingRule, state, features, limits, most_accepted):
    """Return the state after a round, and how many tokens it drafted (B,).

    Features repeat after the last.
    """
    lengths = torch.zeros(BATCH, dtype=torch.long)
    ended = limits == 0
    for step in range(rule.max_tokens):
        if ended.all():
            break
        new, stop = rule.step(state, features[step % len(features)])
        assert stop.dtype == torch.bool
        state = unless(ended, state, new)  # as in a draft step
        check_finite(state)
        lengths = torch.where(ended, lengths, step + 1)
        early = stop & ~ended
        assert not isinstance(rule, SurvivalRule) or (
            step + 1 >= rule.min_tokens or not early.any()
        )
        ended = ended | stop | (lengths >= limits)
    assert ended.all() or (lengths == rule.max_tokens).all()
    return rule.end_round(state, lengths, torch.minimum(lengths, most_accepted)), lengths


@tries(5)
@given(stopping_rules, st.lists(rounds(), min_size=1, max_size=4))
def test_lengths_stay_within_bounds_and_states_finite(rule, played):
    state = rule.start_prompt(BATCH, CPU)
    total = torch.zeros(BATCH, dtype=torch.long)
    check_finite(state)
    for features, limits, most_accepted in played:
        state = rule.start_round(state)
        planned = state.max_tokens if isinstance(rule, FixedLength) else None
        state, lengths = play_round(rule, state, features, limits, most_accepted)
        check_finite(state)
        assert (
            (lengths <= rule.max_tokens).all()
            and (lengths <= limits).all()
            and ((lengths > 0) | (limits == 0)).all()
        )
        if planned is not None:
            assert ((planned >= 1) & (planned <= rule.max_tokens)).all()
            assert torch.equal(lengths, torch.minimum(planned, limits))
        total += lengths
        expected = rule.num_expected(state)
        if expected is not None:
            assert ((expected >= 0) & (expected <= total + 1e-9)).all()


@tries(3)
@given(stopping_rules, rounds())
def test_a_row_does_not_see_its_neighbours(rule, played):
    features, limits, most_accepted = played
    state = rule.start_round(rule.start_prompt(BATCH, CPU))
    together, lengths = play_round(rule, state, features, limits, most_accepted)
    order = torch.tensor([2, 0, 1])
    moved = [{name: value[order] for name, value in step.items()} for step in features]
    apart, moved_lengths = play_round(rule, state, moved, limits[order], most_accepted[order])
    assert torch.equal(lengths[order], moved_lengths)
    for one, other in zip(tree_leaves(together), tree_leaves(apart), strict=True):
        torch.testing.assert_close(one[order], other)


@tries(3)
@given(
    stopping_rules.filter(lambda rule: isinstance(rule, SurvivalRule)),
    st.lists(steps(), min_size=1, max_size=4),
)
def test_a_rule_on_survival_that_tolerates_more_risk_drafts_no_less(rule, features):
    lengths = []
    rule = copy.copy(rule)
    for threshold in sorted(
        {rule.threshold, rule.threshold / 2, (1 + rule.threshold) / 2, 0.0, 1.0}
    ):
        rule.threshold = threshold
        state = rule.start_round(rule.start_prompt(BATCH, CPU))
        lengths.append(play_round(rule, state, features, *torch.full((2, BATCH), 99))[1])
    assert all((more >= fewer).all() for fewer, more in pairwise(lengths))
    assert (lengths[-1] == rule.max_tokens).all()  # with threshold 1
