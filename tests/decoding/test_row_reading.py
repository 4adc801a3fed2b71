"""Tokens of several rows that are read together get what each row would get alone, by transformers'
code and by operators.
"""

import pytest
import torch
from fakes import needs_compiler
from families import CONFIGS, VOCAB_SIZE, WINDOW, tiny_model
from transformers import MistralConfig

from specheads.decoding.engine import EagerEngine, RowPlaces
from specheads.decoding.engine.compiled import CompiledEngine, StepKind, StepModule
from specheads.decoding.engine.cpu import CpuStep
from specheads.pair.language_model import LanguageModel

SHAPE = CONFIGS["llama"].to_dict()
SIZES = {
    name: SHAPE[name]
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
}
SIZES |= {
    "num_hidden_layers": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": WINDOW,
    "intermediate_size": 48,
}
FAMILIES = {**CONFIGS, "mistral": MistralConfig(**SIZES, sliding_window=12)}
# Of the rows' texts, and tokens of each that are read together
LENGTHS = (7, 1, 30)
NUM_READ = (3, 2, 1)


def logits_of(output, *inputs):
    return output.logits[:, 0]


logits_of.compile_key = "logits"


class Rows:
    """Texts in the rows of an engine, the first of them in its last row."""

    def __init__(self, name, engine=EagerEngine, dtype=torch.float64):
        generator = torch.Generator().manual_seed(0)
        self.lm = LanguageModel(tiny_model(FAMILIES[name], seed=4).to(dtype))
        self.texts = [
            torch.randint(VOCAB_SIZE, (1, length + 3), generator=generator) for length in LENGTHS
        ]
        self.engine = engine(self.lm, 64, num_rows=4)
        self.rows = (3, 0, 2)
        for row, text, length in zip(self.rows, self.texts, LENGTHS, strict=True):
            self.engine.read_row(row, text[:, :length])
        tokens = [
            text[0, n : n + count]
            for text, n, count in zip(self.texts, LENGTHS, NUM_READ, strict=True)
        ]
        places = [
            [r, n + i]
            for r, n, count in zip(self.rows, LENGTHS, NUM_READ, strict=True)
            for i in range(count)
        ]
        self.tokens = torch.cat(tokens)[:, None]
        self.places = RowPlaces(*torch.tensor(places).T.contiguous())

    def expected(self):
        """Return the logits of transformers' plain forward passes over each text."""
        parts = []
        for text, length, count in zip(self.texts, LENGTHS, NUM_READ, strict=True):
            parts.append(
                self.lm.model(text[:, : length + count], use_cache=False).logits[0, length:]
            )
        return torch.cat(parts)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_read_as_alone(name):
    rows = Rows(name)
    actual = rows.engine.rows_step(logits_of)(rows.tokens, 40, rows.places)
    expected = rows.expected()
    assert len(torch.unique(expected, dim=0)) == len(expected) == 6
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_in_order_are_read_where_they_lie_to_the_last_bit(name):
    """Whether attention gets views or copies does not matter for its sums."""
    rows = Rows(name)
    step = rows.engine.rows_step(logits_of)
    views = step(rows.tokens[:3], 40, RowPlaces(torch.tensor([1, 2, 3]), torch.tensor([4, 30, 7])))
    places = RowPlaces(torch.tensor([3, 1, 2]), torch.tensor([7, 4, 30]))
    copies = step(rows.tokens[[2, 0, 1]], 40, places)
    assert torch.equal(views, copies[[1, 2, 0]]) and len(torch.unique(views, dim=0)) == 3


@needs_compiler
@torch.no_grad()
@pytest.mark.usefixtures("built_operators")
@pytest.mark.parametrize("few", [True, False], ids=["packed", "attention alone"])
@pytest.mark.parametrize("name", FAMILIES)
def test_operators_read_rows_as_alone(name, few, threads):
    rows = Rows(name, CompiledEngine, torch.float32)
    step = CpuStep(rows.lm, [], few, rows=True)
    module = StepModule(step, logits_of, StepKind(all_logits=True, rows=True))
    assert step.has_operators and step.reads_all_rows == (name not in ("bloom", "gemma2"))
    actual = module(
        rows.tokens, torch.tensor(0), rows.engine._places[:64], rows.engine._memory, (rows.places,)
    )
    torch.testing.assert_close(actual, rows.expected(), atol=2e-4, rtol=0)


@torch.no_grad()
def test_a_row_is_cleared_alone():
    rows = Rows("llama")
    before = [layer.keys.clone() for layer in rows.engine._layers]
    rows.engine.clear_row(0)
    for layer, keys in zip(rows.engine._layers, before, strict=True):
        assert not layer.keys[0].any() and keys[0].any()
        assert torch.equal(layer.keys[1:], keys[1:])


@torch.no_grad()
def test_texts_that_do_not_fit_are_refused():
    rows = Rows("llama")
    with pytest.raises(RuntimeError, match="65 positions do not fit"):
        rows.engine.read_row(0, torch.zeros(1, 65, dtype=torch.long))


@needs_compiler
@torch.no_grad()
@pytest.mark.usefixtures("built_operators")
def test_rows_outside_of_the_memory_are_refused():
    rows = Rows("llama", CompiledEngine, torch.float32)
    module = StepModule(
        CpuStep(rows.lm, [], True, True), logits_of, StepKind(all_logits=True, rows=True)
    )
    for shift in ((1, 0), (0, 64)):
        places = RowPlaces(rows.places.rows + shift[0], rows.places.positions + shift[1])
        with pytest.raises(RuntimeError, match="fit into memory"):
            module(
                rows.tokens,
                torch.tensor(0),
                rows.engine._places[:64],
                rows.engine._memory,
                (places,),
            )
