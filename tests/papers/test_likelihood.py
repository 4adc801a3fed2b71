"""Log-likelihoods next to those that transformers computes, in float64."""

import pytest
import torch
from fakes import tiny_pair
from specheads.papers.reproduction import decoding
from specheads.papers.reproduction.decoding import response_nats

from specheads import Warp
from specheads.decoding.decoder import Baseline

PROMPT = [1, 0, 3]
RESPONSES = [[2, 4, 1, 1, 0, 3, 2], [4], [0, 0, 2]]


def direct_nats(model, prompt, response):
    """Return the negative log-likelihood of a response from the logits of transformers, token by
    token, in float64.
    """
    total = 0.0
    for place, token in enumerate(response):
        with torch.no_grad():
            logits = (
                model(input_ids=torch.tensor([prompt + response[:place]])).logits[0, -1].double()
            )
        total -= logits.log_softmax(-1)[token].item()
    return total


@pytest.fixture
def pair():
    return tiny_pair(5)


@pytest.mark.parametrize("slice_elements", [1, 2**24])
def test_nats_are_those_of_transformers(pair, monkeypatch, slice_elements):
    monkeypatch.setattr(decoding, "SLICE_ELEMENTS", slice_elements)
    assert pair.target.dtype == torch.float64
    for response in RESPONSES:
        expected = direct_nats(pair.target, PROMPT, response)
        assert response_nats(pair.target_lm, PROMPT, response) == pytest.approx(expected, rel=1e-12)


def test_responses_of_a_warped_model_are_read_without_the_warp(nano, prompts):
    """A response that was sampled at a low temperature, of few tokens; in nano's float32."""
    response = Baseline(nano, Warp(0.7, top_k=5)).generate(prompts[0], 9, seed=1).tokens.tolist()
    expected = direct_nats(nano.target, prompts[0], response)
    assert response_nats(nano.target_lm, prompts[0], response) == pytest.approx(expected, rel=1e-4)
