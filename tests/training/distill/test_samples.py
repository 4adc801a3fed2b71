"""Which response a prompt gets in which epoch."""

import numpy as np

from specheads.training.distill.samples import Samples

PROMPTS = [np.array(ids) for ids in ([1, 2], [3], [4, 5, 6])]
ANSWERS = [[[20], [21]], [[22, 23]], [[24]]]


def test_responses_to_a_prompt_take_turns():
    samples = Samples(PROMPTS, ANSWERS)
    assert [[samples[epoch, row].response for row in range(3)] for epoch in range(3)] == [
        [[20], [22, 23], [24]],
        [[21], [22, 23], [24]],
        [[20], [22, 23], [24]],
    ]
    assert samples[4, 2].prompt.tolist() == [4, 5, 6] and samples[0, 0].stored is None


def test_stored_distributions_come_with_their_response():
    stored = Samples(PROMPTS, ANSWERS, {(0, number): f"of {number}" for number in range(2)})
    assert [stored[epoch, 0].stored for epoch in range(2)] == ["of 0", "of 1"]
