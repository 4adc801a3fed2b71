"""What the draft writes itself: drawn from its own law, by (epoch, prompt) alone, kept until the next stretch of steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import tiny_pair

from specheads import Warp
from specheads.training.distill.on_policy import DraftResponses
from specheads.training.distill.samples import Sample

PROMPTS = [[1, 2, 3], [4], [2, 2, 5, 1], [3, 3]]


@pytest.fixture
def pair():
    return tiny_pair(8, scale=2.0)


def asked(epoch=0, rows=range(4)):
    return [Sample((epoch, row), "on_policy", np.array(PROMPTS[row], dtype=np.int32), None) for row in rows]


def writer(pair, warp=None, batch_size=2, seed=0):
    return DraftResponses(pair, warp or Warp(1.0), 6, batch_size, seed)


def test_responses_are_the_drafts_whatever_batch_they_are_in(pair):
    whole = writer(pair, batch_size=4).answered(asked(), lambda: asked())
    for row, sample in enumerate(whole):
        (alone,) = writer(pair, batch_size=1).answered(asked(rows=[row]), lambda row=row: asked(rows=[row]))
        assert alone.response.tolist() == sample.response.tolist() and len(alone.response) == 6
        # Each token by inverting the draft's own law at the number that belongs to it.
        uniform = np.random.default_rng([0, 0, row, 3]).random(6)
        tokens = list(PROMPTS[row])
        for number in uniform:
            distribution = pair.draft(torch.tensor([tokens])).logits[0, -1].softmax(-1).cumsum(-1)
            tokens.append(
                int(
                    torch.searchsorted(
                        distribution, torch.tensor(number * distribution[-1].item(), dtype=distribution.dtype), right=True
                    )
                )
            )
        assert tokens[len(PROMPTS[row]) :] == sample.response.tolist()


def test_other_epochs_and_seeds_draw_other_responses(pair):
    first, other, seeded = (
        [sample.response.tolist() for sample in writer(pair, seed=seed).answered(asked(epoch), lambda epoch=epoch: asked(epoch))]
        for epoch, seed in ((0, 0), (1, 0), (0, 1))
    )
    assert first != other and first != seeded


def test_a_stretch_is_written_at_once_and_kept_until_the_next(pair, monkeypatch):
    own, calls = writer(pair), []
    original = own.write
    monkeypatch.setattr(own, "write", lambda samples: calls.append([s.key for s in samples]) or original(samples))
    first = own.answered(asked(rows=[0, 1]), lambda: asked())
    pair.draft.lm_head.weight.neg_()  # a training step
    second = own.answered(asked(rows=[2, 3]), lambda: asked(rows=[2, 3]))
    assert calls == [[(0, row) for row in range(4)]]
    pair.draft.lm_head.weight.neg_()
    assert [s.response.tolist() for s in first + second] == [
        s.response.tolist() for s in writer(pair).answered(asked(), lambda: asked())
    ]
    own.answered(asked(1), lambda: asked(1))
    assert calls[1] == [(1, row) for row in range(4)] and set(own.found) == {(1, row) for row in range(4)}


def test_what_has_a_response_keeps_it(pair):
    known = replace(asked(rows=[0])[0], kind="text", response=np.array([7, 7], dtype=np.int32))
    found = writer(pair).answered([known, *asked(rows=[1])], lambda: asked(rows=[1, 2]))
    assert found[0] is known and len(found[1].response) == 6


def test_a_greedy_pair_samples(pair):
    greedy, sampled = (writer(pair, Warp(t)).answered(asked(), lambda: asked()) for t in (0.0, 1.0))
    assert [s.response.tolist() for s in greedy] == [s.response.tolist() for s in sampled]


@pytest.mark.parametrize("count", [0, 3])
def test_a_checkpoint_holds_what_was_written(pair, count, tmp_path):
    own = writer(pair)
    if count:
        own.write(asked(rows=range(count)))
    torch.save(own.state(), tmp_path / "state.pt")
    other = writer(pair)
    other.load(torch.load(tmp_path / "state.pt", weights_only=True))
    assert {key: text.tolist() for key, text in other.found.items()} == {key: text.tolist() for key, text in own.found.items()}


def test_writing_leaves_the_draft_in_the_mode_it_was_in(pair):
    pair.draft.train()
    writer(pair).answered(asked(), lambda: asked())
    assert pair.draft.training
