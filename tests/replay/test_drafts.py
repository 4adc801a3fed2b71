"""Drafts from every position of a recording against walking the recording token by token."""

import numpy as np
import pytest
import torch
from families import family_pair

from specheads import AcceptanceHead, HeadConfig, Warp
from specheads.prompts.encoding import ResponseLimits
from specheads.prompts.prompt import Prompt
from specheads.replay.drafts import draft_logits
from specheads.replay.head_scores import add_predictions, head_fingerprint, predictor_names
from specheads.replay.recording import load_recording, make_recording
from specheads.replay.replay import recorded_head, recorded_overlap
from specheads.replay.response_tree import RecordSettings

NUM_TOKENS = 3


def walked(recording, sample, number, start):
    """Yield (node, tokens before it or its branch, whether all so far are accepted) of the draft from a response position."""
    first, length = int(recording.first[number]), int(recording.lengths[number])
    position, branch = start, None
    while True:
        if branch is None and position - start >= int(recording.limits[number]) - 1 - start:
            return
        if branch is None and bool(recording.accepted[sample, first + position]):
            yield first + position, position - start, True
            position += 1
            if position == length:
                return
            continue
        branch = 0 if branch is None else branch + 1
        size = int(recording.branch_length[sample, first + position])
        if branch >= size or position - start + branch >= int(recording.limits[number]) - 1 - start:
            return
        yield int(recording.branch_first[sample, first + position]) + branch, position - start, False


KINDS = {
    "next_token": {"overlap": True},
    "in rounds": {"overlap": True, "inputs": ("hidden", "entropy", "index")},
    "input_token": {"predicts": "input_token"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_a_walk_through_the_recording(tmp_path, kind):
    pair, generator = family_pair("llama"), np.random.default_rng(7)
    torch.manual_seed(0)
    each = AcceptanceHead(HeadConfig(32, 1, width=8, **KINDS[kind])).eval().requires_grad_(False)
    prompts = [(Prompt(f"{i:04x}", "test", ""), generator.integers(29, size=3 + i).tolist()) for i in range(5)]
    folder = make_recording(pair, prompts, Warp(1.0), ResponseLimits(12), RecordSettings(2, 4, 8), 0, tmp_path)
    named = {head_fingerprint(each): each}
    add_predictions(folder, pair, named, ground_truth=False)
    recording = load_recording(folder, predictor_names(named))
    late = int(kind == "input_token")
    for read_out in (recorded_head, recorded_overlap)[: 2 - late]:
        recorded, expected = read_out(each), []
        for sample in range(2):
            for number in range(recording.num_prompts):
                for start in range(int(recording.lengths[number])):
                    tokens = list(walked(recording, sample, number, start))[: NUM_TOKENS + late]
                    row = [(0.0, False, False)] * NUM_TOKENS
                    for place, (node, before, _) in enumerate(tokens[late:]):
                        value = recording.feature(recorded.name, torch.tensor([node]), before).item()
                        row[place] = (value, tokens[place][2], True)
                    expected.append(row)
        drafts = draft_logits(recording, recorded, NUM_TOKENS)
        logits, survived, known = (
            torch.tensor(column) for column in zip(*(zip(*row, strict=True) for row in expected), strict=True)
        )
        assert torch.equal(drafts.known, known)
        assert torch.equal(drafts.survived & known, survived)
        torch.testing.assert_close(drafts.logits, logits.double(), rtol=0, atol=0)
        assert 0 < known.float().mean() < 1 and 0.05 < survived[known].float().mean() < 0.95
