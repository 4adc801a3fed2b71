"""A draft's steps along a text, all at once, against the reference implementation and against a
plain loop with a KV cache.
"""

from itertools import islice

import pytest
import torch
from commands import ROOT
from fakes import random_tensor
from feature_drafts import by_loop
from safetensors.torch import load_file
from transformers import LlamaConfig

from specheads.pair.draft_vocabulary import borrows_embedding
from specheads.pair.eagle_formats import read_feature_draft
from specheads.pair.unrolled import unrolled

FIXTURES = ROOT / "tests" / "fixtures" / "eagle3"
CASES = sorted(folder.name for folder in FIXTURES.iterdir())
EXPORTS = sorted((ROOT / "tests" / "fixtures" / "eagle3_export").iterdir())
TARGET = LlamaConfig(vocab_size=40, hidden_size=16, num_attention_heads=2, num_hidden_layers=8)
STEPS = 4
LENGTHS = (9, 6, 2)


def draft_of(name, dtype=torch.float64):
    return read_feature_draft(FIXTURES / name, TARGET, dtype=dtype)


def texts_of(draft):
    """Return tokens (3, 9), features and drafted tokens of right-padded texts of LENGTHS."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(40, (len(LENGTHS), max(LENGTHS)), generator=generator)
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = 0
    drafted = torch.randint(40, tokens.shape, generator=generator)
    return tokens, random_tensor(*tokens.shape, draft.fc.in_features), drafted


def steps_of(*given, begin=0):
    """Return the states (STEPS, B, T, H) after each step."""
    return torch.stack(list(islice(unrolled(*given, begin), STEPS)))


@pytest.mark.parametrize(
    "folder", [*map(FIXTURES.joinpath, CASES), *EXPORTS], ids=lambda folder: folder.name
)
@torch.no_grad()
def test_all_positions_equal_the_references(folder):
    """Of drafts that speculators wrote, and of those that it or SafeAILab's own code read from our
    folders.
    """
    draft = read_feature_draft(folder, TARGET)
    reference = load_file(folder / "reference.safetensors")
    assert ("embed_tokens" in reference) == borrows_embedding(draft) == (folder in EXPORTS)
    if borrows_embedding(draft):
        draft.embed_tokens.weight.copy_(reference["embed_tokens"])
    tokens = torch.cat([torch.zeros(1).long(), reference["tokens"]])[None]
    features = torch.cat([reference["features"], torch.zeros_like(reference["features"][:1])])[None]
    num_steps = len(reference["logits"])
    steps = islice(unrolled(draft, tokens, features, tokens), num_steps)
    for step, hidden in enumerate(steps):
        found = draft.lm_head(hidden[0, 1 + step :])
        expected = reference["logits"][step, : len(found)]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_every_depth_equals_decoding_step_by_step(name):
    draft = draft_of(name)
    tokens, features, drafted = texts_of(draft)
    found = steps_of(draft, tokens, features, drafted)
    for row, length in enumerate(LENGTHS):
        texts = (tokens[row, :length], features[row, :length])
        expected = by_loop(draft, *texts, STEPS, drafted[row, :length])
        torch.testing.assert_close(found[:, row, :length], expected, atol=1e-12, rtol=0)


def gradients(draft, states):
    """Return the gradient of every weight for a sum over states (J, T, H) with unequal weights."""
    draft.zero_grad()
    (states * random_tensor(*states.shape)).sum().backward()
    named = draft.named_parameters()
    return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


@pytest.mark.parametrize("saves_memory", [False, True])
@pytest.mark.parametrize("name", ["llama_3_1", "llama_norm_before_fc", "qwen3_fc_norm"])
def test_gradients_equal_those_of_the_loop(name, saves_memory):
    draft = draft_of(name).requires_grad_(True).train()
    tokens, features, drafted = texts_of(draft)
    expected = gradients(draft, by_loop(draft, tokens[0], features[0], STEPS, drafted[0]))
    if saves_memory:
        getattr(draft, "activation_checkpointing_enable", draft.gradient_checkpointing_enable)()
    states = steps_of(draft, tokens[:1], features[:1], drafted[:1])
    found = gradients(draft, states[:, 0])
    assert found.keys() == expected.keys() and len(found) > 10
    for part, gradient in expected.items():  # norms compute in float32
        torch.testing.assert_close(found[part], gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("begin", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ["llama_3_1", "qwen3_fc_norm"])
def test_no_steps_are_made_of_rounds_that_begin_too_early(name, begin):
    draft = draft_of(name).requires_grad_(True).train()
    given = texts_of(draft)
    begins = torch.arange(max(LENGTHS)) - torch.arange(STEPS)[:, None]
    is_made = begins >= begin
    is_made[0] = True  # the first step reads the whole text
    expected = steps_of(draft, *given) * is_made[:, None, :, None]
    found = steps_of(draft, *given, begin=begin)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    gradient = gradients(draft, expected)
    for part, same in gradients(draft, found).items():
        torch.testing.assert_close(same, gradient[part], atol=1e-8, rtol=1e-8)


def test_half_precision_stays_near():
    """The score of the own steps' key is two numbers, so that its rounding hardly matters."""
    draft = draft_of("llama", torch.float32)
    texts = texts_of(draft)
    with torch.no_grad():
        exact = steps_of(draft, *texts)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = steps_of(draft, *texts)
    assert (rounded - exact).norm() < 0.02 * exact.norm()
