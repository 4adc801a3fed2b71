"""Responses of the draft: samples of its own distribution, by (epoch, prompt) alone, kept until the next are written."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import tiny_pair

from specheads import Warp
from specheads.prompts.prompt import ResponseLimits
from specheads.training.distill.samples import DraftResponses, Sample

PROMPTS = [[1, 2, 3], [4], [2, 2, 5, 1], [3, 3]]


def kept(responses):
    """Responses as checkpoints have them."""
    return {key: torch.from_numpy(ids) for key, ids in responses.items()}


@pytest.fixture
def pair():
    return tiny_pair(8, scale=2.0)


def unanswered(epoch=0, rows=range(4)):
    return [Sample((epoch, row), np.array(PROMPTS[row], dtype=np.int32), None) for row in rows]


def writer(pair, warp=None, batch_size=2, seed=0):
    return DraftResponses(pair, warp or Warp(1.0), ResponseLimits(6, batch_size=batch_size), seed)


def answered(responses, samples, upcoming=None):
    """Responses to samples, which the draft writes with those of the next steps, `upcoming`, if it has not yet."""
    everywhere = samples if upcoming is None else upcoming
    responses.refresh([sample for sample in samples if sample.response is None], lambda: (everywhere, everywhere))
    return responses.answered(samples)


def test_responses_are_the_drafts_whatever_batch_they_are_in(pair):
    whole = answered(writer(pair, batch_size=4), unanswered())
    for row, sample in enumerate(whole):
        (alone,) = answered(writer(pair, batch_size=1), unanswered(rows=[row]))
        assert alone.response.tolist() == sample.response.tolist() and len(alone.response) == 6
        # Each token by inverting the draft's cumulative distribution at the uniform number of its position.
        uniforms = np.random.default_rng([0, 0, row, 3]).random(6)
        tokens = list(PROMPTS[row])
        for uniform in uniforms:
            cumulative = pair.draft(torch.tensor([tokens])).logits[0, -1].softmax(-1).cumsum(-1)
            threshold = torch.tensor(uniform * cumulative[-1].item(), dtype=cumulative.dtype)
            tokens.append(int(torch.searchsorted(cumulative, threshold, right=True)))
        assert tokens[len(PROMPTS[row]) :] == sample.response.tolist()


def test_other_epochs_and_seeds_sample_other_responses(pair):
    first, other, seeded = (
        [sample.response.tolist() for sample in answered(writer(pair, seed=seed), unanswered(epoch))]
        for epoch, seed in ((0, 0), (1, 0), (0, 1))
    )
    assert first != other and first != seeded


def test_responses_for_many_steps_are_written_at_once_and_kept_until_the_next(pair, monkeypatch):
    responses, calls = writer(pair), []
    original = responses.write
    monkeypatch.setattr(responses, "write", lambda samples: calls.append([s.key for s in samples]) or original(samples))
    first = answered(responses, unanswered(rows=[0, 1]), unanswered())
    pair.draft.lm_head.weight.neg_()  # a training step
    second = answered(responses, unanswered(rows=[2, 3]))
    assert calls == [[(0, row) for row in range(4)]]
    pair.draft.lm_head.weight.neg_()
    assert [s.response.tolist() for s in first + second] == [s.response.tolist() for s in answered(writer(pair), unanswered())]
    answered(responses, unanswered(1))
    assert calls[1] == [(1, row) for row in range(4)] and set(responses.responses) == {(1, row) for row in range(4)}


def test_a_sample_with_a_response_keeps_it(pair):
    known = replace(unanswered(rows=[0])[0], response=np.array([7, 7], dtype=np.int32))
    both = answered(writer(pair), [known, *unanswered(rows=[1])], unanswered(rows=[1, 2]))
    assert both[0] is known and len(both[1].response) == 6


def test_a_greedy_pair_samples(pair):
    greedy, sampled = (answered(writer(pair, Warp(t)), unanswered()) for t in (0.0, 1.0))
    assert [s.response.tolist() for s in greedy] == [s.response.tolist() for s in sampled]


@pytest.mark.parametrize("count", [0, 3])
def test_a_checkpoint_holds_the_responses(pair, count, tmp_path):
    first, second = writer(pair), writer(pair)
    if count:
        first.write(unanswered(rows=range(count)))
    torch.save(kept(first.responses), tmp_path / "state.pt")
    second.load(torch.load(tmp_path / "state.pt", weights_only=True))
    written, loaded = ({key: ids.tolist() for key, ids in each.responses.items()} for each in (first, second))
    assert loaded == written and len(written) == count


def test_writing_leaves_the_draft_in_the_mode_it_was_in(pair):
    pair.draft.train()
    answered(writer(pair), unanswered())
    assert pair.draft.training


def test_processes_write_their_parts_at_the_same_steps(pair):
    """Also a process none of whose samples needs a response in a step."""
    one, other = writer(pair), writer(pair)
    coming = unanswered()
    for responses, here in ((one, coming[:3]), (other, coming[3:])):
        responses.refresh(coming[:1], lambda here=here: (coming, here))
    assert [list(each.responses) for each in (one, other)] == [[(0, 0), (0, 1), (0, 2)], [(0, 3)]]
    other.refresh(coming[1:], lambda: pytest.fail("the responses are written already"))
    together = writer(pair)
    together.load(kept(one.responses | other.responses))
    together.refresh(coming, lambda: pytest.fail("the responses are in the checkpoint"))
    assert [s.response.tolist() for s in together.answered(coming)] == [
        s.response.tolist() for s in answered(writer(pair), coming)
    ]
