"""A tree that is read in one masked forward pass is every one of its paths read alone, in every
family and on every engine.
"""

import pytest
import torch
from families import CONFIGS, VOCAB_SIZE, family_pair

from specheads.decoding.engine import TreeSlots, make_engine

# A root, two levels of branches and a chain; more than Gemma 2's window of 12 after its start.
PARENTS = [0, 0, 0, 1, 1, 2, 4, 7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module", params=CONFIGS)
def lm(request):
    return family_pair(request.param).target_lm


@pytest.fixture(autouse=True)
def softmax_in_float64(monkeypatch):
    """BLOOM's and Gemma 2's attention asks for float32, whose rounding would hide what is looked
    for.
    """
    plain = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional,
        "softmax",
        lambda x, dim=None, _stacklevel=3, dtype=None: plain(x, dim=dim),
    )


def tree_slots_for(base, parents=PARENTS):
    width = len(PARENTS) + 3
    tree_slots = TreeSlots(
        base, torch.zeros(width, dtype=torch.long), torch.eye(width, dtype=torch.bool)
    )
    for slot, parent in enumerate(parents, start=1):
        tree_slots.depth[slot] = tree_slots.depth[parent] + 1
        tree_slots.seen[slot] |= tree_slots.seen[parent]
    return tree_slots


ENGINES = ["eager", "cuda_graph"]


class Tree:
    """A random tree after a random text of `length` tokens, which one step reads from where the
    text ends.
    """

    def __init__(self, lm, engine, length):
        generator = torch.Generator().manual_seed(length)
        self.lm = lm
        self.length = length
        self.context = torch.randint(VOCAB_SIZE, (1, length), generator=generator)
        self.nodes = torch.randint(VOCAB_SIZE, (1, len(PARENTS)), generator=generator)
        self.engine = make_engine(engine, lm, 64)
        self.slots = tree_slots_for(length - 1)
        if length > 1:
            self.engine.forward(self.context[:, :-1])

    def read(self, nodes, slots):
        """Return the logits and hidden states of the text's last token and of nodes."""
        self.engine.rewind(self.length - 1)
        tokens = torch.cat([self.context[:, -1:], nodes], dim=1)
        output = self.engine.forward(tokens, tree_slots=slots, num_logits=tokens.shape[1])
        assert self.engine.length == self.length + nodes.shape[1]
        return output.logits[0], output.hidden[0]

    def paths(self):
        """Yield every slot with the tokens of its path."""
        for slot in range(len(PARENTS) + 1):
            yield (
                slot,
                self.nodes[
                    :, [i - 1 for i in range(1, len(PARENTS) + 1) if self.slots.seen[slot, i]]
                ],
            )

    def alone(self, path):
        """Return the logits and hidden state of a path's end, without an engine."""
        states = self.lm.hidden_states(torch.cat([self.context, path], dim=1), use_cache=False)[
            0, -1
        ]
        return self.lm.logits(states), states


def assert_near(actual, expected, near):
    for one, other, bound in zip(actual, expected, near, strict=True):
        torch.testing.assert_close(one, other, atol=bound, rtol=0)


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_node_is_scored_as_the_end_of_its_path(lm, engine, length):
    tree = Tree(lm, engine, length)
    logits, hidden = tree.read(tree.nodes, tree.slots)
    for slot, path in tree.paths():
        assert_near((logits[slot], hidden[slot]), tree.alone(path), (1e-10, 1e-10))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_text_continues_from_the_kept_path_of_a_tree(lm, engine):
    generator = torch.Generator().manual_seed(1)
    context, nodes = (
        torch.randint(VOCAB_SIZE, (1, n), generator=generator) for n in (9, len(PARENTS))
    )
    engine = make_engine(engine, lm, 64)
    tree_slots = tree_slots_for(8)
    path = [0, 1, 4, 7, 8, 9]
    engine.forward(context[:, :-1])
    first = torch.cat([context[:, -1:], nodes[:, :5]], dim=1)
    for part in (first, nodes[:, 5:]):  # in two parts, as a draft reads its levels
        engine.forward(part, tree_slots=tree_slots)
    engine.keep(8, path)
    assert engine.length == 14
    actual = engine.forward(torch.tensor([[3, 5]]), num_logits=2).logits
    text = torch.cat(
        [context, nodes[:, [slot - 1 for slot in path[1:]]], torch.tensor([[3, 5]])], dim=1
    )
    torch.testing.assert_close(
        actual, lm.logits(lm.hidden_states(text, use_cache=False))[:, -2:], atol=1e-10, rtol=0
    )
