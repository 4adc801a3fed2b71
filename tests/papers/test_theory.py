"""Theory of papers: an exact test of each formula, and the claims that follow from them."""

import itertools

import pytest
import torch
import yaml

from benchmarks.papers import theory
from benchmarks.papers.chains import Chains, bias, emitted, total_variation
from benchmarks.papers.theory import least_bias, most_tokens_per_round
from specheads.decoding.verification import BlockVerification, TokenVerification
from specheads.papers import BiasedVerification

RULES = [TokenVerification(), BlockVerification()]


def chains(seed=0, num_positions=4, vocab_size=3):
    generator = torch.Generator().manual_seed(seed)
    return Chains.random(num_positions, vocab_size, generator, sharpness=1.5)


def test_every_claim_holds():
    texts = yaml.safe_load(theory.TEXTS.read_text())
    claims = theory.claims()
    assert [claim.says for claim in claims] == [text["says"] for text in texts.values()]
    assert {claim.outcome for claim in claims} == {"held"}


def test_the_least_bias_is_none_for_unbiased_rules_and_all_for_those_that_accept_everything():
    target = chains(2).target[0, 0]
    draft = chains(2).draft[0, 0]
    unbiased = least_bias(target, draft, (target / draft).clamp_max(1))
    assert unbiased.item() == pytest.approx(0, abs=1e-12)
    everything = least_bias(target, draft, torch.ones(3).double())
    assert everything.item() == pytest.approx(total_variation(target, draft).item())


@pytest.mark.parametrize("num_drafted", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_lossless_rules_emit_the_targets_tokens_and_a_biased_one_is_noticed(rule, num_drafted):
    known = chains(num_drafted)
    assert emitted(rule, known, num_drafted).sum().item() == pytest.approx(1)
    assert bias(rule, known, num_drafted) < 1e-9
    assert bias(BiasedVerification(eps=0.3), known, num_drafted) > 0.01


@pytest.mark.parametrize("num_drafted", [1, 2, 3])
def test_the_most_tokens_of_a_round_are_those_that_drafts_and_texts_share(num_drafted):
    """The overlap of the probabilities of each first tokens, text by text."""
    known = chains(7, num_drafted + 1)
    expected = 1.0
    for length in range(1, num_drafted + 1):
        for text in itertools.product(range(3), repeat=length):
            probabilities = []
            for model in (known.target, known.draft):
                steps = zip(model, (0, *text), text, strict=False)
                chance = 1.0
                for step, before, token in steps:
                    chance *= step[before, token].item()
                probabilities.append(chance)
            expected += min(probabilities)
    assert most_tokens_per_round(known, num_drafted) == pytest.approx(expected, abs=1e-12)
