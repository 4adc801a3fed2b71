import pytest
import torch
from fakes import tiny_pair

from specheads.pair.revisions import set_draft_temperature
from specheads.pair.sampling import Warp
from specheads.training.distill.draft_quality import draft_quality, with_fitted_temperature
from specheads.training.distill.samples import held_out

VOCAB, WARP = 10, Warp(1.0, top_k=6)


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
