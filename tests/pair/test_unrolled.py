"""A draft's steps along a text, all at once, against the reference implementation and against a
plain loop with a KV cache.
"""

import pytest
import torch
from commands import ROOT
from fakes import random_tensor, tiny_llama
from feature_drafts import by_loop, features_of
from safetensors.torch import load_file
from transformers import LlamaConfig

from specheads.pair.draft_vocabulary import borrows_embedding
from specheads.pair.eagle_formats import read_feature_draft
from specheads.pair.language_model import LanguageModel
from specheads.pair.reading import GivenTexts, states_of
from specheads.pair.unrolled import read_by_depth, unrolled

FIXTURES = ROOT / "tests" / "fixtures" / "eagle3"
CASES = sorted(folder.name for folder in FIXTURES.iterdir())
EXPORTS = sorted((ROOT / "tests" / "fixtures" / "eagle3_export").iterdir())
TARGET = LlamaConfig(vocab_size=40, hidden_size=16, num_attention_heads=2, num_hidden_layers=8)
STEPS = 4
LENGTHS = (9, 6, 2)


def draft_of(name, dtype=torch.float64):
    return read_feature_draft(FIXTURES / name, TARGET, dtype=dtype)


def texts_of(draft):
    """Return tokens (3, 9) and features of right-padded texts of LENGTHS."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(40, (len(LENGTHS), max(LENGTHS)), generator=generator)
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = 0
    return tokens, random_tensor(*tokens.shape, draft.fc.in_features)


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
    for step, hidden in enumerate(unrolled(draft, tokens, features, num_steps)):
        found = draft.lm_head(hidden[0, 1 + step :])
        expected = reference["logits"][step, : len(found)]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_every_depth_equals_decoding_step_by_step(name):
    draft = draft_of(name)
    tokens, features = texts_of(draft)
    found = torch.stack(list(unrolled(draft, tokens, features, STEPS)), dim=1)
    for row, length in enumerate(LENGTHS):
        expected = by_loop(draft, tokens[row, :length], features[row, :length], STEPS)
        torch.testing.assert_close(found[row, :, :length], expected, atol=1e-12, rtol=0)


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
    tokens, features = texts_of(draft)
    expected = gradients(draft, by_loop(draft, tokens[0], features[0], STEPS))
    if saves_memory:
        getattr(draft, "activation_checkpointing_enable", draft.gradient_checkpointing_enable)()
    states = torch.cat(list(unrolled(draft, tokens[:1], features[:1], STEPS)))
    found = gradients(draft, states)
    assert found.keys() == expected.keys() and len(found) > 10
    for part, gradient in expected.items():  # norms compute in float32
        torch.testing.assert_close(found[part], gradient, atol=1e-5, rtol=1e-5)


def test_half_precision_stays_near():
    """The score of the own steps' key is two numbers, so that its rounding hardly matters."""
    draft = draft_of("llama", torch.float32)
    tokens, features = texts_of(draft)
    with torch.no_grad():
        exact = torch.cat(list(unrolled(draft, tokens, features, STEPS)))
        with torch.autocast("cpu", torch.bfloat16):
            rounded = torch.cat(list(unrolled(draft, tokens, features, STEPS)))
    assert (rounded - exact).norm() < 0.02 * exact.norm()


@torch.no_grad()
def test_states_of_responses_come_in_the_order_of_the_texts():
    target = LanguageModel(tiny_llama(40, seed=1, layers=6))
    draft = draft_of("llama")
    prompts = [[1, 2, 3], [4], [5, 6]]
    responses = [[7, 8, 9, 10], [11, 12, 13], [14]]
    texts = GivenTexts.with_responses(prompts, responses)
    for max_tokens in (4, 1000):
        found = read_by_depth(target, draft, texts, 3, max_tokens)
        torch.testing.assert_close(found.target, states_of(target, texts), atol=1e-12, rtol=0)
        place = 0
        for prompt, response in zip(prompts, responses, strict=True):
            tokens = torch.tensor([*prompt, *response])
            features = features_of(target.model, tokens, (2, 4, 5))
            expected = by_loop(draft, tokens, features, 3)
            rows = slice(place, place + len(response))
            states = expected[:, len(prompt) - 1 : -1].transpose(0, 1)
            torch.testing.assert_close(found.draft[rows], states, atol=1e-12, rtol=0)
            place += len(response)
    # The token number i of a response is drafted after j own steps if j < i, or j = i after a pair
    assert found.exists.tolist() == [
        *([True, False, False], [True, True, False], [True, True, True], [True, True, True]),
        *([False, False, False], [True, False, False], [True, True, False]),
        [True, False, False],
    ]
