import pytest
import torch
from fakes import tiny_llama

from specheads.decoding.engine import EagerEngine, TreeSlots, make_engine
from specheads.errors import UserError
from specheads.pair.language_model import LanguageModel


@pytest.fixture
def lm():
    return LanguageModel(tiny_llama(11, seed=0, layers=3))


@pytest.fixture
def tokens():
    return torch.randint(11, (1, 20), generator=torch.Generator().manual_seed(0))


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_pieces_equal_a_single_forward_pass(lm, tokens):
    engine = EagerEngine(lm, 32)
    expected = lm.model(tokens).logits
    actual = torch.cat(
        [
            engine.forward(piece, num_logits=piece.shape[1]).logits
            for piece in tokens.split([7, 1, 1, 5, 6], dim=1)
        ],
        dim=1,
    )
    close(actual, expected)
    assert engine.length == 20


def test_rewound_tokens_leave_no_trace(lm, tokens):
    engine = EagerEngine(lm, 32)
    engine.forward(tokens[:, :8])
    engine.forward(torch.full((1, 6), 3))
    engine.rewind(8)
    close(engine.forward(tokens[:, 8:], num_logits=12).logits, lm.model(tokens).logits[:, 8:])


def tree_slots_of(base, parents, width=8):
    """The tail of a tree whose root is at position `base`, and whose other slots have the parents
    `parents` (slots).
    """
    tree_slots = TreeSlots(
        base, torch.zeros(width, dtype=torch.long), torch.eye(width, dtype=torch.bool)
    )
    for slot, parent in enumerate(parents, start=1):
        tree_slots.depth[slot] = tree_slots.depth[parent] + 1
        tree_slots.seen[slot] |= tree_slots.seen[parent]
    return tree_slots


def test_a_tree_scored_at_once_equals_each_path_alone(lm, tokens):
    context = tokens[:, :6]
    nodes = [4, 5, 6, 7, 8]
    tree_slots = tree_slots_of(5, [0, 0, 1, 1, 3])  # the root is the context's last token
    engine = EagerEngine(lm, 32)
    engine.forward(context[:, :5])
    read = torch.cat([context[:, 5:], torch.tensor([nodes])], dim=1)
    actual = engine.forward(read, tree_slots=tree_slots, num_logits=6).logits[0]
    for slot in range(6):
        path = [nodes[i - 1] for i in range(1, 6) if tree_slots.seen[slot, i]]
        close(
            actual[slot],
            lm.model(torch.cat([context, torch.tensor([path], dtype=torch.long)], dim=1)).logits[
                0, -1
            ],
        )


def test_a_tree_may_be_read_level_by_level(lm, tokens):
    nodes = [4, 5, 6, 7, 8]
    tree_slots = tree_slots_of(5, [0, 0, 1, 1, 3])
    whole = EagerEngine(lm, 32)
    parts = EagerEngine(lm, 32)
    whole.forward(tokens[:, :5])
    expected = whole.forward(
        torch.tensor([[tokens[0, 5], *nodes]]), tree_slots=tree_slots, num_logits=6
    ).logits[0]
    parts.forward(tokens[:, :6])
    actual = [
        parts.forward(torch.tensor([level]), tree_slots=tree_slots, num_logits=len(level)).logits[0]
        for level in ([4, 5], [6, 7], [8])
    ]
    close(torch.cat(actual), expected[1:])


def test_keeping_a_path_of_a_tree_continues_that_path(lm, tokens):
    engine = EagerEngine(lm, 32)
    engine.forward(tokens[:, :6])
    engine.forward(torch.tensor([[4, 5, 6, 7]]), tree_slots=tree_slots_of(5, [0, 0, 2, 3]))
    engine.keep(5, [0, 2, 3])
    assert engine.length == 8
    expected = lm.model(torch.cat([tokens[:, :6], torch.tensor([[5, 6, 9]])], dim=1)).logits[:, -1:]
    close(engine.forward(torch.tensor([[9]])).logits, expected)


def test_left_padded_rows_equal_each_row_alone(lm, tokens):
    short = tokens[:, 12:]
    batch = torch.cat([tokens, torch.cat([torch.zeros(1, 12, dtype=torch.long), short], dim=1)])
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[1, :12] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    engine = EagerEngine(lm, 32)
    engine.forward(batch, positions=positions[:, :20], attention_mask=mask[:, :20])
    step = torch.tensor([[1], [2]])
    actual = engine.forward(step, positions=positions[:, 20:], attention_mask=mask).logits
    close(actual[0, 0], lm.model(torch.cat([tokens, step[:1]], dim=1)).logits[0, -1])
    close(actual[1, 0], lm.model(torch.cat([short, step[1:]], dim=1)).logits[0, -1])


def test_memory_is_allocated_once(lm, tokens):
    engine = EagerEngine(lm, 32)
    engine.forward(tokens[:, :3])
    places = [layer.keys.data_ptr() for layer in engine._layers]
    for _ in range(4):
        engine.forward(tokens[:, :5])
        engine.rewind(4)
    assert [layer.keys.data_ptr() for layer in engine._layers] == places


def test_misuse_is_refused(lm, tokens):
    engine = EagerEngine(lm, 10)
    with pytest.raises(RuntimeError, match="20 positions do not fit"):
        engine.forward(tokens)
    with pytest.raises(RuntimeError, match="rewind"):
        engine.rewind(5)
    with pytest.raises(UserError, match="warp"):
        make_engine("warp", lm, 10)
