"""Whose response a prompt gets in which epoch."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from specheads.training.distill.samples import Ragged, Responses, TrainSamples

PROMPTS = Ragged([[1, 2], [3], [4, 5, 6]])
TEXT = Responses(Ragged([[10], [11], [12]]), [[0], [1], [2]])
TARGET = Responses(Ragged([[20], [21], [22, 23], [24]]), [[0, 1], [2], [3]])


def samples(shares, seed=0, **more):
    return TrainSamples(PROMPTS, {"text": TEXT, "target": TARGET}, shares, seed, **more)


@pytest.mark.parametrize("rows", [[[1, 2], [], [3]], [[]], []])
def test_ragged_rows_are_read_back(rows):
    ragged = Ragged(rows)
    assert [ragged[number].tolist() for number in range(len(ragged))] == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    column = Ragged.of_column(pa.chunked_array([pa.array(rows, pa.list_(pa.int32()))]))
    assert [column[i].tolist() for i in range(len(column))] == rows


def test_each_kind_has_its_responses():
    assert [samples({"text": 1.0})[0, row].response.tolist() for row in range(3)] == [[10], [11], [12]]
    target = samples({"target": 1.0})
    assert [[target[epoch, row].response.tolist() for row in range(3)] for epoch in range(3)] == [
        [[20], [22, 23], [24]],
        [[21], [22, 23], [24]],
        [[20], [22, 23], [24]],
    ]
    assert [target[1, row].number for row in range(3)] == [1, 2, 3]
    unanswered = samples({"on_policy": 1.0})[4, 2]
    assert unanswered.response is None and unanswered.prompt.tolist() == [4, 5, 6] and unanswered.key == (4, 2)


def test_mixed_samples_have_their_shares_and_change_from_epoch_to_epoch():
    shares = {"text": 0.25, "on_policy": 0.75}
    mixed = samples(shares)
    kinds = np.array([[mixed[epoch, row].kind for row in range(3)] for epoch in range(1000)])
    # 3000 draws of chance 1/4: five standard deviations are 0.04, which a right implementation leaves once in two million.
    assert abs((kinds == "text").mean() - 0.25) < 0.04 and set(Counter(kinds.flatten())) == {"text", "on_policy"}
    assert (kinds[:-1] != kinds[1:]).any()
    again = samples(shares)
    assert [again[epoch, 1].kind for epoch in range(50)] == kinds[:50, 1].tolist()
    assert [samples(shares, seed=1)[epoch, 1].kind for epoch in range(50)] != kinds[:50, 1].tolist()


def test_stored_distributions_come_with_their_response():
    stored = samples({"target": 1.0}, stored={"target": {number: f"of {number}" for number in range(4)}})
    assert [stored[epoch, 0].stored for epoch in range(2)] == ["of 0", "of 1"]
    assert samples({"text": 1.0}, stored={"target": {}})[0, 0].stored is None
