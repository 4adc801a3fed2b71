"""Whose response a prompt gets in which epoch."""

from collections import Counter

import numpy as np

from specheads.training.distill.samples import Samples

PROMPTS = [np.array(ids) for ids in ([1, 2], [3], [4, 5, 6])]
ANSWERS = {"text": [[[10]], [[11]], [[12]]], "target": [[[20], [21]], [[22, 23]], [[24]]]}


def samples(shares, seed=0, **more):
    return Samples(PROMPTS, ANSWERS, shares, seed, **more)


def kind_of(sample):
    return "on_policy" if sample.response is None else "text" if sample.response[0] < 20 else "target"


def test_each_kind_has_its_responses():
    assert [samples({"text": 1.0})[0, row].response for row in range(3)] == [[10], [11], [12]]
    target = samples({"target": 1.0})
    assert [[target[epoch, row].response for row in range(3)] for epoch in range(3)] == [
        [[20], [22, 23], [24]],
        [[21], [22, 23], [24]],
        [[20], [22, 23], [24]],
    ]
    unanswered = samples({"on_policy": 1.0})[4, 2]
    assert unanswered.response is None and unanswered.prompt.tolist() == [4, 5, 6] and unanswered.key == (4, 2)


def test_mixed_samples_have_their_shares_and_change_from_epoch_to_epoch():
    shares = {"text": 0.25, "on_policy": 0.75}
    mixed = samples(shares)
    kinds = np.array([[kind_of(mixed[epoch, row]) for row in range(3)] for epoch in range(1000)])
    # 3000 draws of chance 1/4: five standard deviations are 0.04, which a right implementation leaves once in two million.
    assert abs((kinds == "text").mean() - 0.25) < 0.04 and set(Counter(kinds.flatten())) == {"text", "on_policy"}
    assert (kinds[:-1] != kinds[1:]).any()
    assert [sample.key for sample in mixed.unanswered([(0, row) for row in range(3)])] == [
        (0, row) for row in range(3) if kinds[0, row] == "on_policy"
    ]
    again = samples(shares)
    assert [kind_of(again[epoch, 1]) for epoch in range(50)] == kinds[:50, 1].tolist()
    assert [kind_of(samples(shares, seed=1)[epoch, 1]) for epoch in range(50)] != kinds[:50, 1].tolist()


def test_stored_distributions_come_with_their_response():
    stored = samples({"target": 1.0}, stored={"target": {(0, number): f"of {number}" for number in range(2)}})
    assert [stored[epoch, 0].stored for epoch in range(2)] == ["of 0", "of 1"]
    assert samples({"text": 1.0}, stored={"target": {}})[0, 0].stored is None
