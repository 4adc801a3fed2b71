import pytest
import torch
from fakes import tiny_llama

from specheads.decoding.engine import EagerEngine
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


def test_misuse_is_refused(lm, tokens):
    engine = EagerEngine(lm, 10)
    with pytest.raises(RuntimeError, match="20 positions do not fit"):
        engine.forward(tokens)
    with pytest.raises(RuntimeError, match="rewind"):
        engine.rewind(5)
