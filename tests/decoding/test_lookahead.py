"""What heads know of a round, its tokens' index and the target's state, is in decoding what it is in training."""

import itertools

import pytest
import torch

from specheads import SpeculativeDecoder, Warp, stopping
from specheads.heads.batch import HeadBatch, target_states
from specheads.heads.head import AcceptanceHead, HeadConfig

INPUTS = ("hidden", "index", "target_hidden")


class Watched(stopping.HeadThreshold):
    """A head's rule that keeps what the head is shown."""

    def __init__(self, head, **kwargs):
        super().__init__(head, **kwargs)
        self.seen, self.head = [], self
        self.network, self.config = head, head.config
        self.readout, self.check_fits, self.to = head.readout, head.check_fits, head.to

    def __call__(self, features):
        self.seen.append({name: features[name].clone() for name in INPUTS})
        return self.network(features)


def watched(pair, threshold=0.85, max_tokens=6):
    torch.manual_seed(0)
    sizes = {"hidden_size": pair.draft_lm.hidden_size, "target_size": pair.target_lm.hidden_size}
    head = AcceptanceHead(HeadConfig(**sizes, inputs=INPUTS, depth=1)).double()
    return Watched(head, threshold=threshold, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("prompt_length", "engine"),
    [(1, "eager"), (9, "eager"), (1, "cuda_graph")]
    + [pytest.param(*way, marks=pytest.mark.full) for way in ((2, "eager"), (2, "cuda_graph"), (9, "cuda_graph"))],
)
def test_index_and_target_state_are_those_of_training(engine, prompt_length, nano64, prompts):
    rule, prompt = watched(nano64), prompts[0][:prompt_length]
    decoder = SpeculativeDecoder(nano64, stopping=rule, warp=Warp(1.0, 50), engine=engine)
    decoder.warm_up()
    rule.seen.clear()
    out = decoder.generate(prompt, max_new_tokens=40, seed=1)
    assert out.stats.num_discarded > 0 and out.stats.num_accepted > 0 and len({r.num_drafted for r in out.rounds}) > 1
    text, seen = [*prompt, *out.tokens.tolist()], iter(rule.seen)
    start = len(prompt)
    for r in out.rounds:
        steps = list(itertools.islice(seen, r.num_drafted))
        assert [int(step["index"]) for step in steps] == list(range(r.num_drafted))
        # As in training, where the whole response is there: the state does not depend on what follows it.
        at = torch.full((len(steps),), start)
        batch = HeadBatch(torch.tensor([text]), torch.zeros_like(at), at, at, {}, at)
        expected = target_states(nano64.target_lm, batch, batch.start)
        late = target_states(nano64.target_lm, batch, batch.start + 1)
        for step, state, other in zip(steps, expected, late, strict=True):
            torch.testing.assert_close(step["target_hidden"][0], state, atol=1e-10, rtol=0)
            assert (step["target_hidden"][0] - other).abs().max() > 1e-3  # an off-by-one would be noticed
            assert state.any() == (start >= 2)
        start += len(r.tokens)
    assert next(seen, None) is None


def test_a_head_that_reads_the_target_does_not_change_the_output(nano64, prompts):
    plain = SpeculativeDecoder(nano64, stopping=stopping.FixedLength(3), warp=Warp(0)).generate(prompts[1], 30)
    adaptive = SpeculativeDecoder(nano64, stopping=watched(nano64), warp=Warp(0)).generate(prompts[1], 30)
    assert adaptive.tokens.tolist() == plain.tokens.tolist()


def test_no_state_of_a_prompt_reaches_the_next_one(nano64, prompts):
    rule = watched(nano64)
    decoder = SpeculativeDecoder(nano64, stopping=rule, warp=Warp(1.0, 50))
    decoder.generate(prompts[0], 20, seed=1)
    rule.seen.clear()
    decoder.generate(prompts[1][:1], 20, seed=1)  # nothing comes before a prompt of one token
    assert not rule.seen[0]["target_hidden"].any() and rule.seen[-1]["target_hidden"].any()


def test_a_head_that_does_not_read_the_target_keeps_no_state_of_it():
    rule = stopping.HeadThreshold(AcceptanceHead(HeadConfig(16)))
    state = rule.start_round(rule.start_prompt(1, torch.device("cpu")), torch.ones(1, 16))
    assert not rule.reads_target and state.memory.target_hidden.shape == (1, 0)


def test_rules_with_both_kinds_of_head_share_a_decoder(nano64, prompts):
    first = SpeculativeDecoder(nano64, stopping=watched(nano64), warp=Warp(1.0, 50))
    expected = first.generate(prompts[0], 20, seed=3)
    first.with_stopping(stopping.FixedLength(3)).generate(prompts[1], 20, seed=3)
    again = first.generate(prompts[0], 20, seed=3)
    assert [r._replace(draft_seconds=0, verify_seconds=0, commit_seconds=0) for r in again.rounds] == [
        r._replace(draft_seconds=0, verify_seconds=0, commit_seconds=0) for r in expected.rounds
    ]
