"""Fits to recordings."""

import numpy as np
import pytest
from random_recording import random_recording

from specheads import AcceptanceHead, HeadConfig
from specheads.evaluation.serving.readouts import confidence_read_out, head_read_out, read_out_of, survival_sample
from specheads.replay.replay import RecordedHead, recorded_head, recorded_overlap

RECORDING = random_recording(num_prompts=40, num_samples=4)


def test_the_sample_of_survival_agrees_with_what_is_accepted():
    """The first token's mean survival is the acceptance rate; false alarm below 1e-6 at five standard errors of 1,024 drafts."""
    sample = survival_sample(RECORDING, confidence_read_out(RECORDING), 6)
    accepted = RECORDING.labels()[2].double().mean().item()
    assert sample.survival.shape == (1024, 6)
    assert sample.mean[0] == pytest.approx(accepted, abs=0.08)
    assert (np.diff(sample.mean) < 0).all()


def test_a_heads_predictions_take_the_place_of_confidence_after_sampling():
    head = RecordedHead("draft_prob", "next_token", {"slope": [3.0], "intercept": [-1.0]})
    read_out = head_read_out(RECORDING, head)
    assert read_out.before == confidence_read_out(RECORDING).before
    assert read_out.needs == {"max_prob", "entropy", "draft_prob"}
    assert read_out.after.reads_token and not read_out.before.reads_token


def test_a_head_predicts_before_sampling_where_it_can():
    """In simulations as in batches that are decoded."""
    with_overlap, without = (AcceptanceHead(HeadConfig(4, depth=0, overlap=overlap)) for overlap in (True, False))
    read_out = read_out_of(RECORDING, with_overlap)
    assert read_out.before.name == recorded_overlap(with_overlap).name and not read_out.before.reads_token
    assert read_out.after.name == recorded_head(with_overlap).name and read_out.after.reads_token
    assert read_out_of(RECORDING, without).before == confidence_read_out(RECORDING).before
