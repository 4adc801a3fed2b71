"""Captured steps on the CPU: what their inputs, states and memory cost, and that they decode as plain ones do."""

from typing import NamedTuple

import pytest
import torch
from fakes import tiny_pair
from families import family_pair
from torch import Tensor

from specheads import SpeculativeDecoder, Warp, stopping
from specheads.decoding.engine import EagerEngine
from specheads.decoding.engine.cuda_graph import GraphEngine


class Swapped(NamedTuple):
    first: Tensor  # (B,), of each round's steps in turn
    second: Tensor


class InTurn(stopping.StoppingRule):
    """Stops by a state whose parts change places between rounds, and with it where the next round finds them."""

    needs = frozenset({"max_prob"})
    max_tokens = 6
    compile_key = "in turn"

    def start_prompt(self, batch, device):
        return Swapped(torch.zeros(batch, device=device), torch.full((batch,), 0.5, device=device))

    def start_round(self, state, target_hidden=None):
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
        assert [each.num_drafted for each in second.rounds] == [each.num_drafted for each in first.rounds]
    assert len({each.num_drafted for response in plain for each in response.rounds}) > 2


def test_a_state_that_is_captured_when_it_is_in_use_is_not_changed_by_that(monkeypatch):
    """Without a warm-up, graphs are captured when they are first needed."""
    monkeypatch.setattr(SpeculativeDecoder, "prepare", lambda decoder: None)
    plain, captured = (generated(engine, InTurn(), 200) for engine in ("eager", "cuda_graph"))
    for first, second in zip(plain, captured, strict=True):
        assert [each.num_drafted for each in second.rounds] == [each.num_drafted for each in first.rounds]


def test_a_draft_copies_its_state_once(monkeypatch):
    decoder = SpeculativeDecoder(tiny_pair(), stopping=InTurn(), warp=Warp(), engine="cuda_graph")
    decoder.warm_up()
    types, copy = [], torch._foreach_copy_

    def counted(held, given, non_blocking):
        types.append(given[0].dtype)
        assert len({tensor.dtype for tensor in (*held, *given)}) == 1
        copy(held, given, non_blocking=non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    rounds = decoder.generate([0, 1, 2], 30).rounds
    num_steps = sum(each.num_draft_calls for each in rounds)
    assert types.count(torch.float32) <= len(rounds) < num_steps  # the rule's state
    assert types.count(torch.bool) == num_steps  # the tokens that end a response
    assert types.count(torch.float64) == types.count(torch.int64) == num_steps + len(rounds)  # with those of verifications
    assert set(types) == {torch.float32, torch.bool, torch.float64, torch.int64}


def memory_of(engine):
    return [(layer.keys.clone(), layer.values.clone()) for layer in engine._layers]


@pytest.mark.parametrize("nodes", [[0], [0, 1, 2], [0, 2, 5], [0, 1, 4, 5]], ids=str)
def test_the_nodes_of_a_tree_that_stay_are_moved_in_all_layers_at_once(nodes):
    """To where the eager engine moves them, layer by layer."""
    lm = family_pair("llama").target_lm
    kept = []
    for kind in (EagerEngine, GraphEngine):
        engine = kind(lm, 100)
        engine.forward(torch.arange(13)[None], num_logits=0)
        engine.keep(7, nodes)
        assert engine.length == 7 + len(nodes)
        kept.append([memory[:, :, : engine.length] for layer in memory_of(engine) for memory in layer])
    assert all(torch.equal(first, second) for first, second in zip(*kept, strict=True))
    assert len(engine._key_value_tensors()) == 1 and engine._key_value_tensors()[0].shape[0] == 2 * len(engine._layers)
    pointers = {layer.keys.untyped_storage().data_ptr() for layer in engine._layers}
    assert pointers == {engine._key_value_tensors()[0].untyped_storage().data_ptr()}


def test_layers_with_memory_of_several_shapes_keep_tensors_of_their_own(monkeypatch):
    forward = EagerEngine.forward

    def shortened(engine, *args, **options):  # as in a model whose layers differ in their heads
        output = forward(engine, *args, **options)
        engine._layers[1].keys = engine._layers[1].keys[:, :1]
        return output

    monkeypatch.setattr(EagerEngine, "forward", shortened)
    engine = GraphEngine(family_pair("llama").target_lm, 100)
    assert len(engine._key_value_tensors()) == 2 * len(engine._layers)
