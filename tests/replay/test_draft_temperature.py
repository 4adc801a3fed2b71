import pytest
import torch
from fakes import tiny_pair

from specheads.pair.language_model import LanguageModel
from specheads.pair.sampling import Warp, overlap
from specheads.replay.response_batch import TEMPERATURES, ResponseBatch, best_temperature, overlaps_at

VOCAB, WARP = 10, Warp(1.0, top_k=6)


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(0)
    lists = [torch.randint(VOCAB, (6,), generator=generator).numpy() for _ in range(10)]
    return list(zip(lists[:5], lists[5:], strict=True))


def test_overlaps_are_those_of_drafts_at_each_temperature(texts):
    pair = tiny_pair(VOCAB, scale=2.0)
    overlaps = overlaps_at(pair, texts, WARP, 2)
    assert set(overlaps) == set(TEMPERATURES) and len(set(overlaps.values())) == len(TEMPERATURES)
    batch = ResponseBatch.of(*zip(*texts, strict=True), torch.device("cpu"))
    expected = WARP(pair.target_lm.logits(batch.states(pair.target_lm)))
    for temperature in (0.9, 1.2):
        draft = LanguageModel(pair.draft, VOCAB, temperature)
        there = overlap(expected, WARP(draft.logits(batch.states(draft)))).mean().item()
        assert overlaps[temperature] == pytest.approx(there)


def test_the_first_of_equals_is_the_best():
    assert best_temperature({1.0: 0.5, 0.9: 0.7, 0.8: 0.7}) == 0.9
