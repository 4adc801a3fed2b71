"""Captured steps on the CPU, which imitates graphs: where inputs and states lie, and that they
decode as plain ones do. Real graphs are in tests/gpu.
"""

from typing import NamedTuple

import torch
from fakes import tiny_pair
from torch import Tensor

from specheads import SpeculativeDecoder, Warp, stopping
from specheads.decoding.engine.cuda_graph import _HeldInputs


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


def test_inputs_that_lie_in_the_places_of_others_are_not_lost():
    held = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]
    _HeldInputs(held).fill([held[1], held[2], held[0]])
    assert [tensor.item() for tensor in held] == [2, 3, 1]
    wide = torch.arange(4.0)
    _HeldInputs([wide]).fill([wide.flip(0)[:4]])
    assert wide.tolist() == [3, 2, 1, 0]
