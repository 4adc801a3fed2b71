"""Stored distributions are the target's, on the tokens that are kept and on the rest, and give the
same losses.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import tiny_pair
from feature_drafts import reading_pair

from specheads import Warp
from specheads.pair.reading import GivenTexts, states_of
from specheads.training.distill.distill_loss import (
    DIVERGENCES,
    computed_distributions,
    most_likely,
    stored_distributions,
    token_losses,
)
from specheads.training.distill.distill_module import DistillModule
from specheads.training.distill.distillation import prepare
from specheads.training.distill.samples import Samples, StateStore, TargetStore
from specheads.training.distill.settings import Distillation

VOCAB = 12


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(VOCAB, scale=2.0)


@pytest.fixture(scope="module")
def texts():
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB, size) for size in (3, 5, 2)]
    first, second, third, fourth, fifth = (
        random.integers(0, VOCAB, size) for size in (4, 1, 6, 2, 3)
    )
    return prompts, [[first, second], [third, fourth], [fifth]]


KEYS = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]  # of all responses


def store_of(folder, pair, texts, num_kept=4):
    return TargetStore(folder, pair, Samples(*texts), num_kept)


def along(pair, texts, key):
    """The tokens of one response, and the states of both models that predict them."""
    prompts, answers = texts
    row, number = key
    texts = GivenTexts.with_responses([prompts[row]], [answers[row][number]])
    return (
        texts.tokens[texts.row, texts.position + 1],
        states_of(pair.target_lm, texts),
        states_of(pair.draft_lm, texts),
    )


def test_the_rest_is_the_probability_of_all_other_tokens():
    log_probs = torch.randn(5, VOCAB, dtype=torch.float64).log_softmax(-1)
    reduced = most_likely(log_probs, 3)
    assert (reduced.ids == log_probs.topk(3).indices).all()
    torch.testing.assert_close(reduced.log_probs.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(reduced.same_outcomes(log_probs), reduced.log_probs)
    whole = most_likely(log_probs, 99)
    # Nothing is left
    assert whole.ids.shape == (5, VOCAB) and (whole.log_probs[:, -1] < -600).all()


def test_the_store_holds_the_distributions_along_every_response(pair, texts, tmp_path):
    store = store_of(tmp_path, pair, texts)
    store.make()
    for key in KEYS:
        _, hidden, _ = along(pair, texts, key)
        expected = most_likely(pair.target_lm.logits(hidden).log_softmax(-1), 4)
        assert torch.equal(store[key]["ids"], expected.ids.int())
        torch.testing.assert_close(
            store[key]["log_probs"].double(), expected.log_probs, atol=1e-5, rtol=2e-3
        )
    assert (
        store.num_bytes
        == 16 * 26
        == sum(x.numel() * x.element_size() for key in KEYS for x in store[key].values())
    )


@pytest.mark.parametrize("shard_bytes", [1, 100, 2**28])
def test_shards_and_batches_of_any_size_hold_the_same(
    pair, texts, tmp_path, monkeypatch, shard_bytes
):
    whole = store_of(tmp_path / "whole", pair, texts)
    whole.make()
    monkeypatch.setattr("specheads.storage.row_store.SHARD_BYTES", shard_bytes)
    monkeypatch.setattr("specheads.training.loaders.BATCH_TOKENS", 9)
    parts = store_of(tmp_path / "parts", pair, texts)
    parts.make()
    assert len(parts.parts) == {1: 5, 100: 4, 2**28: 1}[shard_bytes]
    for key in KEYS:
        assert all(torch.equal(parts[key][name], whole[key][name]) for name in ("ids", "log_probs"))


@pytest.mark.parametrize("shard_bytes", [1, 700, 2**28])
def test_a_store_of_states_holds_what_the_target_computes(
    texts, tmp_path, monkeypatch, shard_bytes
):
    pair = reading_pair(tiny_pair(VOCAB, scale=2.0))
    prompts, answers = texts
    monkeypatch.setattr("specheads.storage.row_store.SHARD_BYTES", shard_bytes)
    monkeypatch.setattr("specheads.training.loaders.BATCH_TOKENS", 9)
    store = StateStore(tmp_path, pair, Samples(*texts))
    store.make()
    num_bytes = 0
    for row, number in KEYS:
        text = np.concatenate([prompts[row], answers[row][number]])
        whole = pair.target(torch.from_numpy(text)[None], output_hidden_states=True)
        layers = pair.draft.config.target_layers
        expected = [whole.hidden_states[layer][0] for layer in (*layers, -1)]
        stored = store[row, number]
        states = torch.cat(expected, dim=-1)
        torch.testing.assert_close(stored["states"], states, atol=1e-12, rtol=0)
        totals = whole.logits[0].logsumexp(-1)
        totals[: len(prompts[row]) - 1] = 0
        totals[-1] = 0
        torch.testing.assert_close(stored["log_totals"], totals)
        num_bytes += sum(each.nbytes for each in stored.values())
    assert store.num_bytes == num_bytes


@pytest.mark.parametrize("kept", [None, torch.tensor([0, 2, 3, 7, 9, 11])], ids=["all", "few"])
def test_a_draft_learns_from_stored_states_what_it_learns_while_the_target_reads(
    texts, tmp_path, kept
):
    pair = reading_pair(tiny_pair(VOCAB, scale=2.0), kept=kept)
    samples = Samples(*texts)
    store = StateStore(tmp_path, pair, samples)
    store.make()
    results = []
    for stored in (None, store):
        samples.stored = stored
        prepare(pair.draft)
        module = DistillModule(pair, Distillation(num_steps=2, warp=Warp()))
        losses, overlaps, weights = module.losses([samples[0, row] for row in range(3)])
        results.append((losses, overlaps, weights, *gradients_of(losses, pair.draft)))
        assert weights.shape == (len(losses), 2)
    for reading, from_store in zip(*results, strict=True):
        torch.testing.assert_close(from_store, reading, atol=1e-12, rtol=0)


def gradients_of(losses, draft):
    weights = [weight for weight in draft.parameters() if weight.requires_grad]
    return torch.autograd.grad(losses.sum(), weights, allow_unused=True)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_distributions_of_which_all_tokens_are_kept_lose_nothing_but_precision(
    pair, texts, tmp_path, divergence
):
    store = store_of(tmp_path, pair, texts, num_kept=VOCAB)
    store.make()
    _, target, draft = along(pair, texts, (1, 0))
    full = token_losses(
        pair.draft_lm, draft, computed_distributions(pair.target_lm, target), divergence
    )
    from_store = token_losses(pair.draft_lm, draft, stored_distributions(**store[1, 0]), divergence)
    torch.testing.assert_close(from_store, full, atol=2e-2, rtol=2e-3)


def test_other_texts_targets_and_distributions_have_other_stores(pair, texts, tmp_path):
    prompts, answers = texts
    folders = {
        store_of(tmp_path, pair, texts).folder,
        store_of(tmp_path, pair, texts, num_kept=5).folder,
        store_of(
            tmp_path, pair, (prompts, [answers[0][:1], [answers[0][1], *answers[1]], answers[2]])
        ).folder,
        store_of(tmp_path, pair, (prompts, answers[::-1])).folder,
        store_of(tmp_path, replace(pair, target_revision="r2"), texts).folder,
    }
    assert len(folders) == 5


def test_a_store_fits_its_budget_or_not(pair, texts, tmp_path):
    store = store_of(tmp_path, pair, texts)
    assert (
        store.fits(1)
        and store.fits(store.num_bytes / 2**30)
        and not store.fits((store.num_bytes - 1) / 2**30)
    )
    assert not store.fits(0)
