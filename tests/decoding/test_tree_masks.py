"""A tree that is read in one masked forward pass is every one of its paths read alone, in every family and on every engine."""

import pytest
import torch
from fakes import needs_compiler
from families import CONFIGS, VOCAB_SIZE, families_compiled, family_pair

from specheads.decoding.engine import TreeSlots, make_engine

# A root, two levels of branches and a chain; more than Gemma 2's window of 12 after its start.
PARENTS = [0, 0, 0, 1, 1, 2, 4, 7, 8, 9, 10, 11, 12]


class Scores:
    """An epilogue that returns the output of a forward pass."""

    compile_key = "scores"

    def __call__(self, output):
        return output.logits, output.hidden


@pytest.fixture(scope="module", params=CONFIGS)
def lm(request):
    return family_pair(request.param).target_lm


@pytest.fixture(autouse=True)
def softmax_in_float64(monkeypatch):
    """BLOOM's and Gemma 2's attention asks for float32, whose rounding would hide what is looked for."""
    plain = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=None, _stacklevel=3, dtype=None: plain(x, dim=dim))


def tree_slots_for(base):
    tree_slots = TreeSlots.empty(len(PARENTS) + 3, torch.device("cpu"))
    tree_slots.base.fill_(base)
    for slot, parent in enumerate(PARENTS, start=1):
        tree_slots.depth[slot] = tree_slots.depth[parent] + 1
        tree_slots.seen[slot] |= tree_slots.seen[parent]
    return tree_slots


ENGINES = ["eager", "cuda_graph"]


def check_scores(lm, engine, length, near):
    generator = torch.Generator().manual_seed(length)
    context = torch.randint(VOCAB_SIZE, (1, length), generator=generator)
    nodes = torch.randint(VOCAB_SIZE, (1, len(PARENTS)), generator=generator)
    engine, tree_slots = make_engine(engine, lm, 64), tree_slots_for(length - 1)
    if length > 1:
        engine.forward(context[:, :-1])
    read = torch.cat([context[:, -1:], nodes, torch.zeros(1, 2, dtype=torch.long)], dim=1)  # and two that pad it
    logits, hidden = engine.compiled_step(Scores(), all_logits=True, tree=True)(read, tree_slots)
    assert engine.length == length + len(PARENTS) + 2
    for slot in range(len(PARENTS) + 1):
        path = nodes[:, [i - 1 for i in range(1, len(PARENTS) + 1) if tree_slots.seen[slot, i]]]
        alone = torch.cat([context, path], dim=1)
        states = lm.hidden_states(alone, use_cache=False)
        torch.testing.assert_close(hidden[0, slot], states[0, -1], atol=near, rtol=0)
        torch.testing.assert_close(logits[0, slot], lm.logits(states[0, -1]), atol=near, rtol=0)


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_node_is_scored_as_the_end_of_its_path(lm, engine, length):
    check_scores(lm, engine, length, near=1e-10)


@needs_compiler
@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("lm", families_compiled("llama", "bloom"), indirect=True)
def test_every_node_is_scored_so_by_compiled_steps(lm, length):
    check_scores(lm, "compiled", length, near=5e-6)  # rotary angles are float32, and a compiler rounds their sines differently


@pytest.mark.parametrize("engine", ENGINES)
def test_a_text_continues_from_the_kept_path_of_a_tree(lm, engine):
    generator = torch.Generator().manual_seed(1)
    context, nodes = (torch.randint(VOCAB_SIZE, (1, n), generator=generator) for n in (9, len(PARENTS)))
    engine, tree_slots, path = make_engine(engine, lm, 64), tree_slots_for(8), [0, 1, 4, 7, 8, 9]
    compiled_step = engine.compiled_step(Scores(), all_logits=True, tree=True)
    engine.forward(context[:, :-1])
    compiled_step(torch.cat([context[:, -1:], nodes[:, :5]], dim=1), tree_slots)  # in two parts, as a draft reads its levels
    compiled_step(nodes[:, 5:], tree_slots)
    engine.keep(8, path)
    assert engine.length == 14
    actual = engine.forward(torch.tensor([[3, 5]]), num_logits=2).logits
    text = torch.cat([context, nodes[:, [slot - 1 for slot in path[1:]]], torch.tensor([[3, 5]])], dim=1)
    torch.testing.assert_close(actual, lm.logits(lm.hidden_states(text, use_cache=False))[:, -2:], atol=1e-10, rtol=0)
