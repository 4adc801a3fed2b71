"""What a recording says of its draft, against counts by hand."""

from dataclasses import replace

import pytest
import torch
from fakes import tiny_pair
from random_recording import random_recording

from specheads import Warp
from specheads.evaluation.probe.prediction import agreement


def test_the_overlap_is_that_of_both_models_before_each_token():
    pair = tiny_pair(vocab_size=8)
    warp = Warp(0.8, top_k=3)
    prompts = [[1], [2, 3]]
    responses = [[4, 4, 6], [6, 4]]
    lengths = torch.tensor([3, 2])
    tokens = torch.tensor([4, 4, 6, 6, 4, 7, 7, 7])  # the last are of branches
    recording = replace(
        random_recording(num_prompts=2, longest=6),
        prompts=prompts,
        tokens=tokens,
        lengths=lengths,
        first=torch.tensor([0, 3]),
    )
    expected = []
    for prompt, response in zip(prompts, responses, strict=True):
        for end in range(len(response)):
            text = torch.tensor([[*prompt, *response[:end]]])
            draft = warp(pair.draft(text).logits[0, -1:].detach())
            target = warp(pair.target(text).logits[0, -1:].detach())
            expected.append(torch.minimum(draft, target).sum().item())
    overlap, unknown = agreement(pair, recording, warp)
    assert overlap.tolist() == pytest.approx(expected, abs=1e-6)
    assert unknown.tolist() == [0.0] * 5
