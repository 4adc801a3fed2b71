"""The first two sampled tokens on nano against the target's distribution."""

import pytest
import torch
from statistics_helper import chi_square_p_value

from specheads import SpeculativeDecoder, Warp, stopping

NUM_SAMPLES = 1500


@pytest.mark.full
def test_two_sampled_tokens_follow_the_targets_distribution(nano, prompts):
    warp = Warp(1.0, top_k=20)
    prompt = [
        *prompts[1],
        *nano.tokenizer("    if value is None:\n        ", add_special_tokens=False)["input_ids"],
    ]
    lm = nano.target_lm
    first = warp(lm.logits(lm.hidden_states(torch.tensor([prompt]))[0, -1]))
    tokens = first.nonzero().squeeze(1)
    texts = torch.cat([torch.tensor([prompt]).expand(len(tokens), -1), tokens[:, None]], dim=1)
    second = warp(lm.logits(lm.hidden_states(texts)[:, -1]))
    distribution = (first[tokens, None] * second).double()

    decoder = SpeculativeDecoder(nano, stopping=stopping.FixedLength(1), warp=warp)
    counts = torch.zeros_like(distribution)
    place = {token: row for row, token in enumerate(tokens.tolist())}
    accepted = 0
    for seed in range(NUM_SAMPLES):
        out = decoder.generate(prompt, 2, seed=seed, stop_tokens=[])
        accepted += out.stats.num_accepted
        tokens = out.tokens.tolist()
        counts[place[tokens[0]], tokens[1]] += 1
    assert 0.1 * NUM_SAMPLES < accepted < 0.95 * NUM_SAMPLES
    # false alarm with probability 1e-6 (the distribution is in float32, whose rounding is far below
    # what the samples can tell)
    assert chi_square_p_value(counts.flatten(), distribution.flatten() / distribution.sum()) > 1e-6
    assert chi_square_p_value(counts.sum(1), distribution.sum(1) / distribution.sum()) > 1e-6
