import pytest
import torch
from fakes import tiny_pair

from specheads.pair.language_model import LanguageModel
from specheads.pair.reading import GivenTexts, states_of
from specheads.pair.revisions import set_draft_temperature
from specheads.pair.sampling import Warp, overlap
from specheads.training.distill.draft_quality import (
    TEMPERATURES,
    draft_quality,
    overlaps_at,
    with_fitted_temperature,
)
from specheads.training.distill.samples import held_out

VOCAB = 10
WARP = Warp(1.0, top_k=6)


@pytest.fixture
def samples():
    generator = torch.Generator().manual_seed(0)
    lists = [torch.randint(VOCAB, (6,), generator=generator).numpy() for _ in range(10)]
    return held_out(lists[:5], lists[5:])


@pytest.fixture
def pair():
    """The draft is the target, but its logits are divided by 0.8."""
    pair = tiny_pair(VOCAB, scale=2.0, same=True)
    pair.draft = tiny_pair(VOCAB, scale=2.0, same=True).target
    pair.draft.lm_head.weight.mul_(0.8)
    return pair


def test_a_draft_that_is_too_flat_becomes_as_sharp_as_its_target(pair, samples):
    sharp = with_fitted_temperature(pair, samples, WARP, 2)
    assert sharp.draft.config.draft_temperature == sharp.draft_lm.temperature == 0.8
    assert draft_quality(sharp, samples, WARP, 2)["overlap"] == pytest.approx(1)


def test_a_temperature_of_before_is_replaced_and_not_multiplied(pair, samples):
    set_draft_temperature(pair.draft, 3.0)
    assert with_fitted_temperature(pair, samples, WARP, 2).draft_lm.temperature == 0.8


def test_where_all_are_equal_it_stays_one(pair, samples):
    assert with_fitted_temperature(pair, samples, Warp(0.0), 2).draft_lm.temperature == 1


def test_overlaps_are_those_of_drafts_at_each_temperature(samples):
    pair = tiny_pair(VOCAB, scale=2.0)
    overlaps = overlaps_at(pair, samples, WARP, 2)
    assert set(overlaps) == set(TEMPERATURES) and len(set(overlaps.values())) == len(TEMPERATURES)
    responses = [response for (response,) in samples.answers]
    texts = GivenTexts.with_responses(samples.prompts, responses)
    expected = WARP(pair.target_lm.logits(states_of(pair.target_lm, texts)))
    for temperature in (0.9, 1.2):
        draft = LanguageModel(pair.draft, VOCAB, temperature)
        there = overlap(expected, WARP(draft.logits(states_of(draft, texts)))).mean().item()
        assert overlaps[temperature] == pytest.approx(there)
