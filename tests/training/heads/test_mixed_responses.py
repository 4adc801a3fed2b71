"""Draws per epoch and where rounds begin, which heads that look at the round learn from."""

import numpy as np
import pytest
import torch

from specheads.decoding.stopping import MAX_TOKENS
from specheads.heads.batch import HeadBatch, collate, target_states
from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.training.heads.mixed_responses import MixedResponses, round_starts


def row(length, draft_logprob, target_logprob, prompt_length=3, num_samples=3):
    places = np.arange(length)
    return {
        "prompt_ids": list(range(prompt_length)),
        "response_ids": (1000 + places).tolist(),
        "draft_ids": (2000 + places).tolist(),
        "accept_prob": (places / length).tolist(),
        "overlap": (1 - places / length).tolist(),
        "more_draft_ids": [(3000 + 1000 * draw + places).tolist() for draw in range(num_samples - 1)],
        "more_accept_prob": [np.full(length, 0.1 * (1 + draw)).tolist() for draw in range(num_samples - 1)],
        "response_draft_logprob": np.broadcast_to(draft_logprob, length).tolist(),
        "response_target_logprob": np.broadcast_to(target_logprob, length).tolist(),
    }


@pytest.mark.parametrize("predicts", ["input_token", "next_token"])
def test_each_epoch_takes_the_next_sample(predicts):
    data = MixedResponses([row(50, -1.0, -1.0)], predicts, None, 0)
    for epoch in range(7):
        item = data[epoch, 0]
        places = item["drafted"] % 1000
        assert set(item["drafted"] // 1000) == {2 + epoch % 3}
        expected = places / 50 if epoch % 3 == 0 else np.full(len(places), 0.1 * (epoch % 3))
        np.testing.assert_allclose(item["label"], expected, atol=1e-6)
        if predicts == "input_token":  # what is mixed in is the draw that is asked about
            assert (item["tokens"][item["index"]] == item["drafted"]).all()


def test_a_text_is_mixed_differently_in_every_epoch():
    data, again = (MixedResponses([row(50, -1.0, -1.0)] * 2, "input_token", None, 0) for _ in range(2))
    assert data.mixes and (data[0, 1]["tokens"] != data[3, 1]["tokens"]).any()
    for name in ("tokens", "index", "drafted"):
        assert (data[3, 1][name] == again[3, 1][name]).all()


def test_a_draft_that_the_target_would_never_follow_has_rounds_of_one():
    starts = round_starts(row(30, -np.inf, -1.0), np.random.default_rng(0))
    assert (starts == np.arange(30)).all()


def test_a_draft_that_is_always_followed_has_rounds_of_all_lengths_up_to_the_longest():
    starts = round_starts(row(20_000, -1.0, -2.0), np.random.default_rng(0))
    begun = np.flatnonzero(np.diff(starts, prepend=-1))
    drafted = np.diff(begun)[:-1] - 1  # the last token of a round is the target's
    assert (np.diff(starts) >= 0).all() and (starts <= np.arange(20_000)).all()
    counts = np.bincount(drafted, minlength=MAX_TOKENS + 1)
    assert counts[0] == 0 and len(counts) == MAX_TOKENS + 1
    # About 1,700 rounds, 87 of each length, with a standard deviation of 9; five of them by chance once in 1e5 over the twenty.
    assert abs(counts[1:] - counts[1:].mean()).max() < 5 * counts[1:].mean() ** 0.5


def test_a_round_ends_with_the_probability_of_a_rejection():
    """Tokens with d/t = 1/4 come from the draft once in four times; long rounds are then too rare to matter."""
    starts = round_starts(row(40_000, np.log(0.1), np.log(0.4)), np.random.default_rng(1))
    reached = np.bincount(np.arange(40_000) - starts)
    share = reached[1] / reached[0]
    # A round of one token at most ends after it whoever speaks; 1/20 of rounds are such: their second place is the target's.
    expected = 0.25
    assert abs(share - expected) < 5 * (expected * (1 - expected) / reached[0]) ** 0.5


def test_impossible_tokens_end_a_round_without_a_warning():
    with np.errstate(all="raise"):
        starts = round_starts(row(5, -np.inf, -np.inf), np.random.default_rng(0))
    assert (starts == np.arange(5)).all()


def test_rounds_differ_by_epoch_row_and_seed_and_are_sampled_on_request_only():
    rows = [row(60, np.log(0.3), np.log(0.4))] * 2

    def starts(epoch, number, seed=0, in_rounds=True):
        return tuple(MixedResponses(rows, "next_token", None, seed, in_rounds=in_rounds)[epoch, number]["start"])

    keys = [(epoch, number, seed) for epoch in range(2) for number in range(2) for seed in range(2)]
    assert len({starts(*key) for key in keys}) == 8 and starts(1, 1, 1) == starts(1, 1, 1)
    assert starts(0, 0, in_rounds=False) == tuple(range(3, 63))


def test_the_target_state_is_that_of_the_position_before_the_rounds_last_context_token(nano64, prompts):
    """A round at position p follows the token at p - 1, which was decided from the state at p - 2."""
    text = prompts[0][:12]
    start = torch.tensor([0, 1, 2, 5, 12])
    at = torch.full_like(start, 11)
    states = target_states(nano64.target_lm, HeadBatch(torch.tensor([text]), torch.zeros_like(at), at, at, {}, start), start)
    assert not states[:2].any()
    for number, place in enumerate(start.tolist()[2:], start=2):
        prefix = torch.tensor([text[: place - 1]])
        expected = nano64.target(prefix, output_hidden_states=True).hidden_states[-1][0, -1]
        torch.testing.assert_close(states[number], expected, atol=1e-10, rtol=0)


def test_a_padded_batch_has_each_rows_own_starts():
    data = MixedResponses(
        [row(9, np.log(0.3), np.log(0.4), prompt_length=p) for p in (2, 5)], "next_token", None, 0, in_rounds=True
    )
    batch = collate([data[0, 0], data[0, 1]])
    assert batch.start[:9].min() == 2 and batch.start[9:].min() == 5
    assert ((batch.index - batch.start) >= 0).all() and (batch.index - batch.start).max() > 0


@pytest.mark.parametrize(
    ("name", "hidden_size", "target_size", "forward"),
    [
        # Multiply-adds of a draft forward: weights outside the input embedding, from the models' own configs.
        ("Llama 68M", 768, 4096, 2 * (4 * 768**2 + 3 * 768 * 3072) + 768 * 32_000),
        ("TinyLlama 1.1B", 2048, 8192, 22 * (2 * 2048**2 + 2 * 2048 * 256 + 3 * 2048 * 5632) + 2048 * 32_000),
        ("Llama 2 7B", 4096, 8192, 32 * (4 * 4096**2 + 3 * 4096 * 11_008) + 4096 * 32_000),
    ],
)
def test_a_head_with_all_inputs_stays_under_two_percent_of_a_wide_drafts_forward(name, hidden_size, target_size, forward):
    inputs = ("hidden", "embedding", "draft_prob", "max_prob", "entropy", "index", "target_hidden")
    with torch.device("meta"):
        plain = AcceptanceHead(HeadConfig(hidden_size))
        full = AcceptanceHead(HeadConfig(hidden_size, inputs=inputs, target_size=target_size))
    cost, full_cost = (sum(p.numel() for p in head.parameters() if p.dim() == 2) for head in (plain, full))
    assert cost < full_cost and cost < 0.02 * forward
    if name != "Llama 68M":  # whose target's state alone is five times as wide as its own
        assert full_cost < 0.02 * forward
