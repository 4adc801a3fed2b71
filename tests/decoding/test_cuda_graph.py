"""Captured steps on the CPU: what their inputs and states cost, and that they decode as plain ones
do.
"""

from typing import NamedTuple

import torch
from fakes import tiny_pair
from torch import Tensor

from specheads import SpeculativeDecoder, Warp, stopping


class Swapped(NamedTuple):
    first: Tensor  # (B,), of each round's steps in turn
    second: Tensor


class InTurn(stopping.StoppingRule):
    """Stops by a state whose parts change places between rounds, and with it where the next round
    finds them.
    """

    needs = frozenset({"max_prob"})
    max_tokens = 6
    compile_key = "in turn"

    def start_prompt(self, batch, device):
        return Swapped(torch.zeros(batch, device=device), torch.full((batch,), 0.5, device=device))

    def start_round(self, state):
        return Swapped(state.second, state.first)

    def step(self, state, features):
        first = state.first + features["max_prob"].float()
        return Swapped(first, state.second), first > 1.7 + state.second.frac()


def generated(engine, rule, count=40):
    decoder = SpeculativeDecoder(tiny_pair(window=400), stopping=rule, warp=Warp(), engine=engine)
    return [decoder.generate([0, 1, 2], count, seed=seed) for seed in range(3)]


def test_a_state_is_updated_in_place_and_is_that_of_plain_steps():
    """Past the first size of memory, whose graphs share the state with those of the next."""
    plain, captured = (generated(engine, InTurn(), 200) for engine in ("eager", "cuda_graph"))
    for first, second in zip(plain, captured, strict=True):
        assert second.tokens.tolist() == first.tokens.tolist()
        assert [each.num_drafted for each in second.rounds] == [
            each.num_drafted for each in first.rounds
        ]
    assert len({each.num_drafted for response in plain for each in response.rounds}) > 2


def test_a_state_that_is_captured_when_it_is_in_use_is_not_changed_by_that(monkeypatch):
    """Without a warm-up, graphs are captured when they are first needed."""
    monkeypatch.setattr(SpeculativeDecoder, "prepare", lambda decoder: None)
    plain, captured = (generated(engine, InTurn(), 200) for engine in ("eager", "cuda_graph"))
    for first, second in zip(plain, captured, strict=True):
        assert [each.num_drafted for each in second.rounds] == [
            each.num_drafted for each in first.rounds
        ]


def test_a_draft_copies_its_state_once(monkeypatch):
    decoder = SpeculativeDecoder(tiny_pair(), stopping=InTurn(), warp=Warp(), engine="cuda_graph")
    decoder.warm_up()
    types = []
    copy = torch._foreach_copy_

    def counted(held, given, non_blocking):
        types.append(given[0].dtype)
        assert len({tensor.dtype for tensor in (*held, *given)}) == 1
        copy(held, given, non_blocking=non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    rounds = decoder.generate([0, 1, 2], 30).rounds
    num_steps = sum(each.num_draft_calls for each in rounds)
    assert types.count(torch.float32) <= len(rounds) < num_steps  # the rule's state
    assert types.count(torch.bool) == num_steps  # the tokens that end a response
    assert (
        types.count(torch.float64) == types.count(torch.int64) == num_steps + len(rounds)
    )  # with those of verifications
    assert set(types) == {torch.float32, torch.bool, torch.float64, torch.int64}
