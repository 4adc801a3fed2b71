"""Which states predict which response tokens."""

import numpy as np
import pytest
import torch
from fakes import tiny_pair

from specheads.replay import response_batch as module
from specheads.replay.response_batch import ResponseBatch

RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, 10, size) for size in (2, 5, 3)]
RESPONSES = [RANDOM.integers(0, 10, size) for size in (7, 1, 4)]


@pytest.mark.parametrize("batch_tokens", [1, 18, 8192])
def test_states_are_those_before_each_response_token(monkeypatch, batch_tokens):
    monkeypatch.setattr(module, "BATCH_TOKENS", batch_tokens)
    pair = tiny_pair(10, scale=2.0)
    batch = ResponseBatch.of(PROMPTS, RESPONSES, torch.device("cpu"))
    assert batch.tokens[:, 1:][batch.predicting[:, :-1]].tolist() == [
        token for response in RESPONSES for token in response
    ]
    texts = [
        torch.from_numpy(np.concatenate(text))[None]
        for text in zip(PROMPTS, RESPONSES, strict=True)
    ]
    alone = [pair.target_lm.hidden_states(text, use_cache=False)[0] for text in texts]
    expected = torch.cat(
        [states[len(prompt) - 1 : -1] for states, prompt in zip(alone, PROMPTS, strict=True)]
    )
    torch.testing.assert_close(batch.states(pair.target_lm), expected, atol=1e-12, rtol=0)
