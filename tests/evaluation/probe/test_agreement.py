"""What a recording says of its draft, against counts by hand."""

import numpy as np
import pytest
from random_recording import random_recording

from specheads.evaluation.probe.prediction import better_draft, survival


@pytest.fixture
def recording():
    return random_recording(num_prompts=8, num_samples=3)


def test_survival_is_the_share_of_positions_whose_next_tokens_are_accepted(recording):
    counts = np.zeros(4)
    total = 0
    for sample in range(recording.num_samples):
        for first, length in zip(recording.first.tolist(), recording.lengths.tolist(), strict=True):
            for position in range(first, first + length):
                flags = recording.accepted[sample, position : first + length].tolist()
                if not flags[0] and not recording.branch_length[sample, position]:
                    continue
                run = flags.index(False) if False in flags else len(flags)
                counts += np.arange(1, 5) <= run
                total += 1
    assert survival(recording, 4) == pytest.approx((counts / total).tolist())


def test_a_better_draft_is_accepted_more_often_by_the_share_asked_for():
    recording = random_recording(num_prompts=60, acceptance=0.6)
    better = better_draft(recording, 0.1)
    before, after = (each.accepted.double().mean().item() for each in (recording, better))
    assert after / before == pytest.approx(1.1, abs=4 * 0.5 / recording.accepted.numel() ** 0.5 / before)
    assert (better.accepted >= recording.accepted).all()
