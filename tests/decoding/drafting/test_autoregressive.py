"""Chains: drafting a step ahead of the stop flag changes nothing but the number of forward passes."""

from typing import NamedTuple

import pytest
import torch
from fakes import constant_head, tiny_pair
from torch import Tensor

from specheads import SpeculativeDecoder, UserError, Warp, stopping
from specheads.decoding.drafting import Autoregressive
from specheads.decoding.drafting.autoregressive import Flag


class Count(NamedTuple):
    steps: Tensor  # (B,) long, in all rounds
    distribution: Tensor  # (B, 2), a state with a dimension more


class EveryThird(stopping.StoppingRule):
    """Stop after every third step since the prompt: a rule whose state would show a step that should not have been."""

    needs = frozenset({"max_prob"})
    max_tokens = 5
    compile_key = "every third"

    def start_prompt(self, batch, device):
        return Count(torch.zeros(batch, dtype=torch.long, device=device), torch.zeros(batch, 2, device=device))

    def start_round(self, state, target_hidden=None):
        return state

    def step(self, state, features):
        steps = state.steps + 1
        return Count(steps, state.distribution + features["max_prob"][:, None].float()), steps % 3 == 0


RULES = {
    "fixed": stopping.FixedLength(3),
    "head": stopping.HeadThreshold(constant_head(0.8), 0.5),
    "across rounds": EveryThird(),
}


@pytest.mark.parametrize("engine", ["eager", "cuda_graph"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("warp", [Warp(temperature=0), Warp()], ids=["greedy", "sampled"])
def test_a_step_ahead_of_the_flag_gives_the_same_tokens(warp, rule, engine):
    outputs = []
    for ahead in (False, True):
        decoder = SpeculativeDecoder(tiny_pair(), Autoregressive(ahead), rule, warp=warp, engine=engine)
        outputs.append([decoder.generate([0, 1, 2], 40, seed=seed, stop_tokens=[4]) for seed in range(4)])
    for waited, hurried in zip(*outputs, strict=True):
        assert hurried.tokens.tolist() == waited.tokens.tolist()
        for a, b in zip(waited.rounds, hurried.rounds, strict=True):
            assert (b.num_drafted, b.num_accepted) == (a.num_drafted, a.num_accepted)
            assert a.num_draft_calls == a.num_drafted
            assert b.num_draft_calls - b.num_drafted in (0, 1)
    extra = sum(r.num_draft_calls - r.num_drafted for hurried in outputs[1] for r in hurried.rounds)
    assert extra > 0 or rule.max_tokens == 3  # what a fixed length's last flag says is known without it


def test_ahead_is_true_or_false():
    with pytest.raises(UserError, match=r"drafting\.ahead=3"):
        Autoregressive(ahead=3)


@pytest.mark.parametrize("value", [False, True])
def test_a_flag_of_a_gpu_is_waited_for_by_its_event(monkeypatch, value):
    """The host goes on when the flag has arrived; it does not wait for what was issued after it."""
    calls = []

    class Event:
        def record(self, stream):
            calls.append(("record", stream))

        def synchronize(self):
            calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the queue")
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory, **options: zeros(*size, **options))  # pinning needs a GPU
    flag = Flag(torch.device("cuda:1"))
    assert flag.wait_for(torch.tensor([value])) is value
    assert calls == [("record", "the queue"), "synchronize"]
