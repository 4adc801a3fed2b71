"""What a recording says of its draft, against counts by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import tiny_pair
from random_recording import random_recording

from specheads import Warp
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import StepTimes
from specheads.evaluation.probe import prediction
from specheads.evaluation.probe.prediction import agreement, better_draft, cuts_of, missing_tokens
from specheads.evaluation.replayed_sets import RecordedSet


@pytest.fixture
def recording():
    return random_recording(num_prompts=8, num_samples=3)


def test_a_better_draft_is_accepted_more_often_by_the_share_asked_for():
    recording = random_recording(num_prompts=60, acceptance=0.6)
    better = better_draft(recording, 0.1)
    before, after = (each.accepted.double().mean().item() for each in (recording, better))
    assert after / before == pytest.approx(
        1.1, abs=4 * 0.5 / recording.accepted.numel() ** 0.5 / before
    )
    assert (better.accepted >= recording.accepted).all()


@pytest.fixture
def halves():
    """Two recordings of responses of a vocabulary of eight; the stop token is 5."""

    def recording(prompts, *responses):
        lengths = torch.tensor([len(response) for response in responses])
        tokens = torch.tensor(
            [*(token for response in responses for token in response), 7, 7, 7]
        )  # the last are of branches
        some = random_recording(num_prompts=2, longest=6)
        return replace(
            some, prompts=prompts, tokens=tokens, lengths=lengths, first=lengths.cumsum(0) - lengths
        )

    return [recording([[1], [2, 3]], [4, 4, 6], [6, 4]), recording([[3], [2]], [0, 1, 4, 0], [5])]


def test_a_cut_keeps_the_tokens_that_are_frequent_in_responses(monkeypatch, halves):
    pair = tiny_pair(vocab_size=8)
    pair.target.generation_config.eos_token_id = 5
    monkeypatch.setattr(prediction, "CUT_SIZES", (2, 5, 8))
    kept = [
        [(~mask).nonzero().flatten().tolist() for mask in missing_tokens(pair, half)]
        for half in halves
    ]
    # The stop token always, then by count, then the tokenizer's first ones; 8 are all.
    assert kept == [[[4, 5], [0, 1, 4, 5, 6]], [[0, 5], [0, 1, 2, 4, 5]]]
    assert missing_tokens(replace(pair, known_to_draft=torch.arange(8) < 7), halves[0]) == []


def test_what_a_cut_would_bring_is_exact_but_for_the_step(monkeypatch, halves):
    pair = tiny_pair(vocab_size=8)
    warp = Warp(0.8, top_k=3)
    monkeypatch.setattr(prediction, "CUT_SIZES", (2, 5, 8))  # the last is no cut
    missing = [missing_tokens(pair, half) for half in halves[::-1]]
    rows = [agreement(pair, half, warp, masks) for half, masks in zip(halves, missing, strict=True)]
    expected = []
    for half, masks in zip(halves, missing, strict=True):
        for number, prompt in enumerate(half.prompts):
            for end in range(len(half.response(number))):
                text = torch.tensor([[*prompt, *half.response(number)[:end]]])
                draft, target = (
                    model(text).logits[0, -1].detach() for model in (pair.draft, pair.target)
                )
                drafts = [
                    warp(draft[None])[0],
                    *(warp(draft.masked_fill(mask, -torch.inf)[None])[0] for mask in masks),
                ]
                overlaps = [
                    torch.minimum(each, warp(target[None])[0]).sum().item() for each in drafts
                ]
                expected.append([overlaps[0], 0.0, *overlaps[1:]])
    found = np.concatenate([each for half in rows for each in half], axis=1)
    assert np.allclose(found.T, np.array(expected), rtol=0, atol=1e-6)
    times = StepTimes(StepCosts(0.01, 0.1), {})
    sets = [RecordedSet("", "dev", half, range(2)) for half in halves]
    cuts = cuts_of(pair, times, sets, missing, found[2:].mean(axis=1))
    assert [cut.size for cut in cuts] == [2, 5] and [cut.overlap for cut in cuts] == found[2:].mean(
        axis=1
    ).tolist()
    kept = [
        [~mask[half.tokens[:5]] for half, mask in zip(halves, masks, strict=True)]
        for masks in zip(*missing, strict=True)
    ]
    assert [cut.coverage for cut in cuts] == [
        torch.cat(each).double().mean().item() for each in kept
    ]
    output = pair.draft.lm_head.weight.nbytes
    whole = sum(weight.nbytes for weight in pair.draft.parameters())
    tied = pair.draft.lm_head.weight is pair.draft.get_input_embeddings().weight
    whole -= 0 if tied else pair.draft.get_input_embeddings().weight.nbytes
    assert cuts[0].step_bytes == pytest.approx(whole - output * 6 / 8)
    assert cuts[0].draft_seconds == pytest.approx(0.01 * cuts[0].step_bytes / whole)


def test_a_cut_is_a_line_of_the_report():
    from specheads.evaluation.probe.prediction import Cut
    from specheads.evaluation.probe.report import _cut
    from specheads.replay.intervals import Interval

    probed = SimpleNamespace(
        times=StepTimes(StepCosts(0.0112, 0.0495), {}), overlap=Interval(0.52, 0.5, 0.54)
    )
    costs = "about 3.70 in place of 11.20 ms"
    assert _cut(Cut(8192, 23.7e6, 0.0037, 0.885, 0.48), probed) == (
        "with an output of 8,192 tokens",
        (
            f"a step reads 23.7 MB of weights, {costs}; 88.5% of the target's tokens, overlap 48.0%"
            " in place of 52.0%"
        ),
    )
