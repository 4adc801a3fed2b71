"""Which states predict which response tokens, and those of drafts that read their target."""

import numpy as np
import pytest
import torch
from fakes import tiny_pair
from feature_drafts import by_loop, features_of, reading_pair

from specheads.pair.reading import GivenTexts, draft_states, read, read_by_depth, states_of

RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, 10, size) for size in (2, 5, 3, 1)]
RESPONSES = [RANDOM.integers(0, 10, size) for size in (7, 1, 4, 3)]
LENGTHS = [len(response) for response in RESPONSES]
BATCHES = pytest.mark.parametrize("max_tokens", [1, 18, 8192])


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@BATCHES
def test_states_are_those_before_each_response_token(max_tokens):
    pair = tiny_pair(10, scale=2.0)
    texts = GivenTexts.with_responses(PROMPTS, RESPONSES)
    assert texts.tokens[texts.row, texts.position + 1].tolist() == [*np.concatenate(RESPONSES)]
    expected = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        alone = torch.from_numpy(np.concatenate([prompt, response]))[None]
        states = pair.target_lm.hidden_states(alone, use_cache=False)[0]
        expected.append(states[len(prompt) - 1 : -1])
    states = states_of(pair.target_lm, texts, max_tokens)
    assert_equal(states, torch.cat(expected))
    assert [len(each) for each in texts.of_rows(states)] == LENGTHS
    both = read(pair, texts, max_tokens=max_tokens)
    assert torch.equal(both.target, states)
    assert torch.equal(draft_states(pair, texts), read(pair, texts).draft)
    kept = read(pair, texts, 2 * states)
    assert torch.equal(kept.target, 2 * states)


def by_loops(pair, drafted, num_steps):
    """Return the states (J, N, H) of a draft before each response token, text by text."""
    expected = []
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        tokens = torch.from_numpy(np.concatenate([prompt, response]))
        features = features_of(pair.target, tokens, pair.draft_lm.reads_layers)
        states = by_loop(pair.draft, tokens, features, num_steps, drafted[row, : len(tokens)])
        expected.append(states[:, len(prompt) - 1 : -1])
    return torch.cat(expected, dim=1)


@BATCHES
def test_a_draft_that_reads_its_target_has_the_states_of_the_depths_that_are_asked_for(max_tokens):
    pair = reading_pair(tiny_pair(10, scale=2.0), layers=(1, 0))
    texts = GivenTexts.with_responses(PROMPTS, RESPONSES)
    plain = read(pair, texts, max_tokens=max_tokens)
    assert_equal(plain.target, states_of(pair.target_lm, texts))
    assert_equal(plain.draft, by_loops(pair, texts.tokens, 1)[0])
    generator = torch.Generator().manual_seed(0)
    depth = torch.randint(4, (len(texts.row),), generator=generator)
    drafted = torch.randint(10, texts.tokens.shape, generator=generator)
    texts = texts._replace(depth=depth, drafted=drafted)
    found = read(pair, texts, max_tokens=max_tokens)
    expected = by_loops(pair, drafted, 4)
    assert_equal(found.draft, expected[depth, torch.arange(len(depth))])
    assert_equal(draft_states(pair, texts), found.draft)
    assert not any(part._forward_pre_hooks for part in pair.target.modules())  # none stays


@BATCHES
def test_states_at_every_depth_come_in_the_order_of_the_texts(max_tokens):
    pair = reading_pair(tiny_pair(10, scale=2.0))
    texts = GivenTexts.with_responses(PROMPTS, RESPONSES)
    found = read_by_depth(pair, texts, 3, max_tokens)
    assert_equal(found.target, states_of(pair.target_lm, texts))
    expected = by_loops(pair, texts.tokens, 3).transpose(0, 1)
    assert_equal(found.draft[found.exists], expected[found.exists])
    # The token number i of a response is drafted after j own steps if j < i, or j = i after a pair
    exists = [each.tolist() for each in texts.of_rows(found.exists)]
    assert exists[1] == [[True, False, False]]
    assert exists[2] == [[True, False, False], [True, True, False], *[[True] * 3] * 2]
    assert exists[3] == [[False] * 3, [True, False, False], [True, True, False]]


def test_no_positions_have_no_states():
    texts = GivenTexts(torch.tensor([[3]]), *torch.zeros(2, 0, dtype=torch.long))
    for pair in (tiny_pair(10), reading_pair(tiny_pair(10))):
        for states in (*read(pair, texts), draft_states(pair, texts)):
            assert len(states) == 0
