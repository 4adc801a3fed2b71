"""Enumerated outputs: unbiased rules, biased ones that are noticed, and blocks that are chosen
jointly.
"""

import pytest
import torch

from benchmarks.papers.chains import Chains, bias, emitted, total_variation
from benchmarks.papers.rejections import (
    after_batch,
    expected_rejections,
    fewest_rejections,
    least_bias,
)
from benchmarks.papers.rounds import most_likely_blocks
from specheads import papers, verification


def chains(seed, num_positions=4, vocab_size=3):
    return Chains.random(
        num_positions, vocab_size, torch.Generator().manual_seed(seed), sharpness=1.5
    )


@pytest.mark.parametrize("num_drafted", [1, 2, 3])
@pytest.mark.parametrize(
    "rule", [verification.TokenVerification(), verification.BlockVerification()]
)
def test_lossless_rules_emit_the_targets_tokens(rule, num_drafted):
    for seed in range(4):
        known = chains(seed)
        assert emitted(rule, known, num_drafted).sum().item() == pytest.approx(1)
        assert bias(rule, known, num_drafted) < 1e-6


def test_a_biased_rule_is_noticed():
    assert bias(papers.BiasedVerification(eps=0.3), chains(0), 2) > 0.01


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_batches_emit_the_targets_tokens(num_drafts):
    known = chains(1, vocab_size=6)
    torch.testing.assert_close(
        sum(after_batch(known.target, known.draft, num_drafts)), known.target
    )


@pytest.mark.parametrize("seed", range(4))
def test_no_rule_of_the_kind_rejects_less(seed):
    known = chains(seed)
    assert fewest_rejections(known) == pytest.approx(expected_rejections(known))


def test_the_least_bias_is_none_for_unbiased_rules_and_all_for_those_that_accept_everything():
    target = chains(2).target[0, 0]
    draft = chains(2).draft[0, 0]
    assert least_bias(target, draft, (target / draft).clamp_max(1)).item() == pytest.approx(
        0, abs=1e-12
    )
    assert least_bias(target, draft, torch.ones(3).double()).item() == pytest.approx(
        total_variation(target, draft).item()
    )


def test_the_most_likely_block_is_greedy_for_one_token_and_never_below_it_for_all():
    for seed in range(10):
        known = chains(seed, 4, 2)
        singly = most_likely_blocks(known, 4, 1)
        jointly = most_likely_blocks(known, 4, 4)
        last = 0
        nats = 0.0
        for target in known.target:
            token = int(target[last].argmax())
            nats = nats + target[last, token].log().item()
            last = token
        assert singly == pytest.approx(nats) and jointly >= singly - 1e-12
