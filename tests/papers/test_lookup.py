import pytest
import torch
from fakes import tiny_pair

from examples.new_draft import KnownText, continuation
from specheads import SpeculativeDecoder, UserError, Warp, stopping


@pytest.mark.parametrize(
    ("text", "most", "limit", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3, 4, [9, 1, 2, 3]),
        ([1, 2, 3, 9, 1, 2, 3], 3, 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 3, 6, [9, 1, 2, 3, 9, 1]),  # goes on as it has begun
        ([1, 2, 5, 7, 2, 6, 1, 2], 3, 2, [5, 7]),  # three are nowhere, two are
        ([1, 2, 5, 1, 2, 6, 1, 2], 3, 1, [6]),  # the latest
        ([1, 2, 5, 7, 2, 6, 1, 2], 1, 1, [6]),  # of one token
        ([4, 4, 4], 2, 5, [4] * 5),
        ([1, 2, 3], 3, 5, []),
        ([1], 3, 5, []),
        ([1, 2, 1], 3, 0, []),
    ],
)
def test_the_continuation_of_the_longest_run_is_found(text, most, limit, expected):
    assert list(continuation(text, most, limit)) == expected


def test_no_draft_model_is_run():
    pair = tiny_pair(4)
    decoder = SpeculativeDecoder(
        pair, KnownText(), stopping.FixedLength(4), warp=Warp(0), engine="eager"
    )
    pair.draft.forward = pair.draft.base_model.forward = None
    out = decoder.generate([0, 1, 2, 0, 1], 20)
    assert out.stats.num_draft_calls == 0 < out.stats.num_accepted


def test_rules_that_look_at_the_drafts_distribution_are_refused():
    with pytest.raises(UserError, match="no draft model is run.*MaxProbability needs its max_prob"):
        SpeculativeDecoder(tiny_pair(4), KnownText(), stopping.MaxProbability(0.5))


def test_a_draft_ends_with_a_token_that_ends_the_response():
    decoder = SpeculativeDecoder(tiny_pair(4), KnownText(), stopping.FixedLength(4), engine="eager")
    drafter = decoder.single.rounds.drafter
    ends = torch.tensor([False, False, True, False])
    state = stopping.FixedLength(4).start_prompt(1, torch.device("cpu"))
    assert drafter.draft([0, 1, 2, 3, 0], state, 9, None, ends).tokens == [1, 2]
