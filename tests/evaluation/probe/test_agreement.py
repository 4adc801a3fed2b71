"""What a recording says of its draft, against counts by hand."""

import pytest
from random_recording import random_recording

from specheads.evaluation.probe.prediction import better_draft


@pytest.fixture
def recording():
    return random_recording(num_prompts=8, num_samples=3)


def test_a_better_draft_is_accepted_more_often_by_the_share_asked_for():
    recording = random_recording(num_prompts=60, acceptance=0.6)
    better = better_draft(recording, 0.1)
    before, after = (each.accepted.double().mean().item() for each in (recording, better))
    assert after / before == pytest.approx(1.1, abs=4 * 0.5 / recording.accepted.numel() ** 0.5 / before)
    assert (better.accepted >= recording.accepted).all()
