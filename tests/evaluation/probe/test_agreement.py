"""Counts of fixed lengths without stopping rules, against walks by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_recording import random_recording

from specheads.evaluation.probe.prediction import Agreement, better_draft, block_counts, fixed_counts, survival


@pytest.fixture
def recording():
    return random_recording(num_prompts=8, num_samples=3)


def agreed(recording, ratio):
    """Return an agreement whose tokens all have the same ratio of draft to target probability."""
    lengths = recording.lengths.tolist()
    target = [np.zeros(length) - 1.0 for length in lengths]
    halves = [np.full(length, 0.5) for length in lengths]
    return Agreement(halves, [each + np.log(ratio) for each in target], target, halves)


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


def test_block_verification_of_a_draft_that_is_the_target_accepts_everything(recording):
    for length, counts in zip((1, 3), block_counts(recording, agreed(recording, 1.0), (1, 3)), strict=True):
        assert counts.accepted.tolist() == counts.drafted.tolist()
        assert counts.tokens.tolist() == [recording.num_samples * each for each in recording.lengths.tolist()]
        per_round = counts.tokens.sum() / counts.target_calls.sum()
        assert length < per_round <= length + 1


def test_block_verification_of_a_draft_without_hope_accepts_nothing(recording):
    (counts,) = block_counts(recording, agreed(recording, 1e-12), (4,))
    assert counts.accepted.sum() == 0 and counts.target_calls.sum() == counts.tokens.sum()


def test_one_token_is_accepted_as_often_by_both_verifications():
    """The flags of a recording and the chances of an agreement say the same if the flags were drawn from them."""
    recording, ratio = random_recording(num_prompts=120, num_samples=4), 0.7
    flags = torch.rand(recording.accepted.shape, generator=torch.Generator().manual_seed(1)) < ratio
    recording = replace(recording, accepted=flags, branch_length=torch.ones_like(recording.branch_length))
    (token,), (block,) = fixed_counts(recording, (1,)), block_counts(recording, agreed(recording, ratio), (1,))
    rates = [each.tokens.sum() / each.target_calls.sum() for each in (token, block)]
    # Tokens per round have a standard deviation below 1/2; 4.5 standard errors have a false alarm in 1e-5 runs.
    assert abs(rates[0] - rates[1]) < 4.5 * 0.5 * (2 / token.target_calls.sum()) ** 0.5
    assert rates[1] == pytest.approx(1 + ratio, abs=0.05)
