"""MJGD: blocks of the highest joint probability, against enumeration."""

import itertools

import pytest
import torch
from fakes import tiny_pair

from specheads import Warp, generate_baseline
from specheads.errors import UserError
from specheads.papers.mjsd import BlockSearch


def joint(pair, text, path):
    lm = pair.target_lm
    distributions = lm.logits(lm.hidden_states(torch.tensor([[*text, *path]])))[0].softmax(-1)
    return (
        torch.stack([distributions[len(text) - 1 + i, token] for i, token in enumerate(path)])
        .log()
        .sum()
        .item()
    )


@pytest.mark.parametrize("engine", ["eager", "cuda_graph"])
def test_with_all_beams_every_block_is_the_most_likely(engine):
    pair = tiny_pair(4, scale=2.0)
    block = 3
    out = BlockSearch(pair, block, beams=64, engine=engine).generate([0, 1, 2], 9, stop_tokens=[])
    text = [0, 1, 2]
    for _ in range(3):
        text += max(
            itertools.product(range(4), repeat=block),
            key=lambda path, text=text: joint(pair, text, path),
        )
    assert out.tokens.tolist() == text[3:]
    assert out.stats.num_target_calls == 9 and len(out.rounds) == 3


def test_blocks_of_one_token_are_greedy_decoding():
    pair = tiny_pair(4, scale=2.0)
    out = BlockSearch(pair, 1, 4).generate([0, 1], 12, stop_tokens=[])
    assert (
        out.tokens.tolist()
        == generate_baseline(pair, [0, 1], 12, warp=Warp(0), stop_tokens=[]).tokens.tolist()
    )


def test_a_response_ends_with_a_stop_token_and_at_its_length():
    pair = tiny_pair(4, scale=2.0)
    whole = BlockSearch(pair, 4, 8).generate([0, 1], 10, stop_tokens=[])
    assert len(whole.tokens) == 10 and whole.finish_reason == "length"
    stop = whole.tokens.tolist()[0]
    out = BlockSearch(pair, 4, 8).generate([0, 1], 10, stop_tokens=[stop])
    assert out.finish_reason in ("stop", "length") and out.tokens.tolist().count(stop) <= 1


def test_a_response_ends_with_the_window():
    out = BlockSearch(tiny_pair(4), 2, 4, window=9).generate([0, 1], 20, stop_tokens=[])
    assert len(out.tokens) == 7 and out.finish_reason == "context"


def test_several_prompts_are_refused():
    with pytest.raises(
        UserError, match=r"^BlockSearch decodes one prompt at a time; use max_batch=1\.$"
    ):
        BlockSearch(tiny_pair(3)).generate_batch([[0], [1]], max_batch=2)
