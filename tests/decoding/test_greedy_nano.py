"""Greedy speculative output against transformers' plain greedy generation, on nano in float64 so
that rounding decides nothing.

SPECHEADS_GREEDY_PROMPTS=50 pytest tests/decoding/test_greedy_nano.py takes more prompts (some five
minutes).
"""

import os

import pytest
import torch
from fakes import describe

from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp, stopping
from specheads.prompts.sources import NanoSource

NUM_PROMPTS = int(os.environ.get("SPECHEADS_GREEDY_PROMPTS", "2"))
NUM_TOKENS = 24
FIXED_LENGTHS = (2, 4, 8, 14)
THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)


def sensitive_head(pair, predicts):
    """An untrained head whose predictions spread widely, so that every threshold stops at its own
    places.
    """
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(pair.draft_lm.hidden_size, depth=1, predicts=predicts))
    torch.nn.init.normal_(head.readout.weight, std=0.2)
    torch.nn.init.constant_(head.readout.bias, 1.0)
    return head.requires_grad_(False)


@pytest.fixture(scope="module")
def references(nano64):
    """(prompt, the target's greedy continuation) for NUM_PROMPTS held-out prompts."""
    rows = []
    for prompt in NanoSource(0, 0, NUM_PROMPTS).load(chats=False):
        ids = torch.tensor([nano64.encode_instruction(prompt.text)])
        out = nano64.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        rows.append((ids[0].tolist(), out[0, ids.shape[1] :].tolist()))
    assert len(rows) == NUM_PROMPTS
    return rows


@pytest.mark.parametrize(
    "rules", ["fixed", pytest.param("input_token", marks=pytest.mark.full), "next_token"]
)
def test_every_setting_gives_the_targets_greedy_tokens(nano64, references, rules):
    if rules == "fixed":
        settings = [stopping.FixedLength(k) for k in FIXED_LENGTHS]
    else:
        head = sensitive_head(nano64, rules)
        settings = [stopping.HeadThreshold(head, t) for t in THRESHOLDS]
    decoder = SpeculativeDecoder(nano64, warp=Warp(temperature=0))
    decoders = [decoder.with_stopping(rule) for rule in settings]
    drafted = [0] * len(settings)
    for prompt, expected in references:
        for index, decoder in enumerate(decoders):
            out = decoder.generate(prompt, NUM_TOKENS)
            assert out.tokens.tolist() == expected, f"{describe(settings[index])} on {prompt}"
            drafted[index] += out.stats.num_drafted
    # The settings did differ
    assert drafted == sorted(drafted) and len(set(drafted)) == len(drafted)
