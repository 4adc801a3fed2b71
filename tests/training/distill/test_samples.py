"""Whose response a prompt gets, and in which epoch."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from specheads import UserError
from specheads.training.distill.samples import Ragged, Responses, Samples, SampleSettings

PROMPTS = Ragged([[1, 2], [3], [4, 5, 6]])
TEXT = Responses(Ragged([[10], [11], [12]]), [[0], [1], [2]])
TARGET = Responses(Ragged([[20], [21], [22, 23], [24]]), [[0, 1], [2], [3]])


def samples(settings, seed=0, **more):
    return Samples(PROMPTS, {"text": TEXT, "target": TARGET}, settings, seed, **more)


@pytest.mark.parametrize("rows", [[[1, 2], [], [3]], [[]], []])
def test_ragged_rows_come_back(rows):
    found = Ragged(rows)
    assert [row.tolist() for row in (found[i] for i in range(len(found)))] == rows
    assert found.lengths.tolist() == [len(row) for row in rows]
    column = Ragged.of_column(pa.chunked_array([pa.array(rows, pa.list_(pa.int32()))]))
    assert [column[i].tolist() for i in range(len(column))] == rows


def test_each_kind_gives_its_own_responses():
    assert [samples(SampleSettings("text"))[0, row].response.tolist() for row in range(3)] == [[10], [11], [12]]
    target = samples(SampleSettings("target"))
    assert [[target[epoch, row].response.tolist() for row in range(3)] for epoch in range(3)] == [
        [[20], [22, 23], [24]],
        [[21], [22, 23], [24]],
        [[20], [22, 23], [24]],
    ]
    assert [target[1, row].number for row in range(3)] == [1, 2, 3]
    own = samples(SampleSettings("on_policy"))[4, 2]
    assert own.response is None and own.prompt.tolist() == [4, 5, 6] and own.key == (4, 2)


def test_mixed_samples_have_their_shares_and_change_from_epoch_to_epoch():
    settings = SampleSettings("mixed", {"text": 1, "target": 0, "on_policy": 3})
    assert settings.shares == {"text": 0.25, "on_policy": 0.75}
    found = samples(settings)
    kinds = np.array([[found[epoch, row].kind for row in range(3)] for epoch in range(1000)])
    # 3000 draws of chance 1/4: five standard deviations are 0.04, which a right implementation leaves once in two million.
    assert abs((kinds == "text").mean() - 0.25) < 0.04 and set(Counter(kinds.flatten())) == {"text", "on_policy"}
    assert (kinds[:-1] != kinds[1:]).any()
    again = samples(settings)
    assert [again[epoch, 1].kind for epoch in range(50)] == kinds[:50, 1].tolist()
    assert [samples(settings, seed=1)[epoch, 1].kind for epoch in range(50)] != kinds[:50, 1].tolist()


def test_a_stored_law_comes_with_its_response():
    found = samples(SampleSettings("target"), distributions={"target": {i: f"law {i}" for i in range(4)}})
    assert [found[epoch, 0].distribution for epoch in range(2)] == ["law 0", "law 1"]
    assert samples(SampleSettings("text"), distributions={"target": {}})[0, 0].distribution is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"samples": "both"}, "samples=both is not known; use one of text, target, on_policy, mixed"),
        ({"samples": "mixed", "mixed": {"own": 1}}, "mixed.own is not known"),
        ({"samples": "mixed", "mixed": {"text": -1, "target": 2}}, "mixed.text=-1"),
        ({"samples": "mixed", "mixed": {"text": 0}}, "all shares are 0"),
        ({"refresh_every": 0}, "refresh_every=0"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        SampleSettings(**given)
