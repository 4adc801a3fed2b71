"""Each epoch takes the next sample of a row."""

import numpy as np
import pytest

from specheads.training.heads.mixed_responses import MixedResponses


def row(length, prompt_length=3, num_samples=3):
    places = np.arange(length)
    return {
        "prompt_ids": list(range(prompt_length)),
        "response_ids": (1000 + places).tolist(),
        "draft_ids": (2000 + places).tolist(),
        "accept_prob": (places / length).tolist(),
        "more_draft_ids": [
            (3000 + 1000 * draw + places).tolist() for draw in range(num_samples - 1)
        ],
        "more_accept_prob": [
            np.full(length, 0.1 * (1 + draw)).tolist() for draw in range(num_samples - 1)
        ],
    }


@pytest.mark.parametrize("predicts", ["input_token", "next_token"])
def test_each_epoch_takes_the_next_sample(predicts):
    data = MixedResponses([row(50)], predicts, None, 0)
    for epoch in range(7):
        item = data[epoch, 0]
        places = item["drafted"] % 1000
        assert set(item["drafted"] // 1000) == {2 + epoch % 3}
        expected = places / 50 if epoch % 3 == 0 else np.full(len(places), 0.1 * (epoch % 3))
        np.testing.assert_allclose(item["label"], expected, atol=1e-6)
        if predicts == "input_token":  # what is mixed in is the draw that is asked about
            assert (item["tokens"][item["index"]] == item["drafted"]).all()


def test_a_text_is_mixed_differently_in_every_epoch():
    data, again = (MixedResponses([row(50)] * 2, "input_token", None, 0) for _ in range(2))
    assert (data[0, 1]["tokens"] != data[3, 1]["tokens"]).any()
    for name in ("tokens", "index", "drafted"):
        assert (data[3, 1][name] == again[3, 1][name]).all()


@pytest.mark.parametrize("predicts", ["input_token", "next_token"])
def test_epochs_take_the_mixes_in_turn_with_tokens_that_the_text_has_or_lacks(predicts):
    every_epoch = MixedResponses([row(50)], predicts, 0.4, 0)
    data = MixedResponses([row(50)], predicts, 0.4, 0, num_mixes=2)
    for epoch in range(7):
        item = data[epoch, 0]
        assert (item["tokens"] == every_epoch[epoch % 2, 0]["tokens"]).all()
        # A head that has read the token cannot predict another one of its position.
        sample = epoch % 2 if predicts == "input_token" else epoch % 3
        assert set(item["drafted"] // 1000) == {2 + sample}


def test_unmixed_texts_are_one_mix_whose_tokens_change():
    data = MixedResponses([row(50)], "next_token", 1.0, 0, num_mixes=4)
    assert data.num_mixes == 1
    assert [data[epoch, 0]["drafted"][0] // 1000 for epoch in range(4)] == [2, 3, 4, 2]


@pytest.mark.parametrize("share", [0.15, 0.6])
def test_that_share_of_the_responses_own_tokens_stays(share):
    data = MixedResponses([row(900)], "input_token", share, 0)
    kept = [data[epoch, 0]["tokens"][3:] // 1000 == 1 for epoch in range(20)]
    spread = (share * (1 - share) / np.size(kept)) ** 0.5
    assert abs(np.mean(kept) - share) < 5 * spread  # fails by chance once in 1.7 million
