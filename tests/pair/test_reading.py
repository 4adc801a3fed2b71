"""Which states predict which response tokens, and what a draft that reads its target is given."""

import numpy as np
import pytest
import torch
from fakes import tiny_pair

from specheads.pair import reading
from specheads.pair.language_model import LanguageModel
from specheads.pair.reading import GivenTexts, read, states_by_length, states_of

RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, 10, size) for size in (2, 5, 3)]
RESPONSES = [RANDOM.integers(0, 10, size) for size in (7, 1, 4)]


@pytest.mark.parametrize("batch_tokens", [1, 18, 8192])
@pytest.mark.parametrize("reader", [states_of, states_by_length])
def test_states_are_those_before_each_response_token(monkeypatch, reader, batch_tokens):
    pair = tiny_pair(10, scale=2.0)
    texts = GivenTexts.with_responses(PROMPTS, RESPONSES)
    assert texts.tokens[texts.row, texts.position + 1].tolist() == [*np.concatenate(RESPONSES)]
    expected = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        alone = torch.from_numpy(np.concatenate([prompt, response]))[None]
        states = pair.target_lm.hidden_states(alone, use_cache=False)[0]
        expected.append(states[len(prompt) - 1 : -1])
    monkeypatch.setattr(reading, "BATCH_TOKENS", batch_tokens)
    states = reader(pair.target_lm, texts)
    torch.testing.assert_close(states, torch.cat(expected), atol=1e-12, rtol=0)
    assert [len(each) for each in texts.of_rows(states)] == [7, 1, 4]


class ReadsTarget(LanguageModel):
    """A draft whose state is the mean of what it is given of the target."""

    reads_layers = (0, 1)

    def states_along(self, tokens, target_layers=None):
        return target_layers.unflatten(-1, (2, -1)).mean(dim=-2)


def test_a_draft_that_reads_the_target_is_given_the_inputs_of_its_layers():
    pair = tiny_pair(10, scale=2.0)
    texts = GivenTexts.with_responses(PROMPTS, RESPONSES)
    plain = read(pair, texts)
    assert torch.equal(plain.draft, states_of(pair.draft_lm, texts))
    pair.draft_lm = ReadsTarget(pair.draft, pair.vocab_size)
    states = read(pair, texts)
    layers = pair.target(texts.tokens, output_hidden_states=True).hidden_states[:2]
    assert torch.equal(states.target, plain.target)
    torch.testing.assert_close(states.draft, texts.at(torch.stack(layers).mean(dim=0)))
    assert not any(part._forward_pre_hooks for part in pair.target.modules())  # none stays
