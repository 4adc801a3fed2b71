"""Stored laws are the target's, on the tokens that are kept and on the rest, and give its losses."""

import numpy as np
import pytest
import torch
from fakes import tiny_pair

from specheads import UserError
from specheads.training.distill.distill_loss import LossSettings, kept, laws_of, stored_probs, token_losses, with_rest
from specheads.training.distill.distill_module import Texts
from specheads.training.distill.divergences import DIVERGENCES
from specheads.training.distill.samples import Ragged, Responses, Sample
from specheads.training.distill.target_store import TargetStore, check_target_probs

VOCAB = 12


@pytest.fixture(scope="module")
def pair():
    return tiny_pair(VOCAB, scale=2.0)


@pytest.fixture(scope="module")
def texts():
    random = np.random.default_rng(0)
    prompts = Ragged([random.integers(0, VOCAB, size) for size in (3, 5, 2)])
    responses = Ragged([random.integers(0, VOCAB, size) for size in (4, 1, 6, 2, 3)])
    return prompts, Responses(responses, [[0, 1], [2, 4], [3]])


def store(folder, pair, texts, settings=None, top_k=4):
    return TargetStore(folder, pair.target_lm, ["tiny", "r1"], *texts, settings or LossSettings(), top_k)


def along(pair, texts, number):
    """The texts of one response, and the states of both models that it comes from."""
    prompts, responses = texts
    row = next(i for i, numbers in enumerate(responses.of_prompt) if number in numbers)
    own = Texts.of([Sample((0, row), "target", prompts[row], responses.tokens[number])], torch.device("cpu"))
    return own, own.states(pair.target_lm), own.states(pair.draft_lm)


def test_a_rest_is_what_is_left_of_a_law():
    distributions = torch.randn(5, VOCAB, dtype=torch.float64).log_softmax(-1)
    distribution = kept(distributions, 3)
    assert (distribution.ids == distributions.topk(3).indices).all()
    torch.testing.assert_close(distribution.log_probs.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(distribution.of_draft(distributions), distribution.log_probs)
    whole = kept(distributions, 99)
    assert whole.ids.shape == (5, VOCAB) and (whole.log_probs[:, -1] < -600).all()  # nothing is left


def test_gradients_of_a_rest_are_those_of_its_probability():
    logits = torch.randn(4, VOCAB, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: with_rest(x.log_softmax(-1)[:, :5]), logits)
    whole = with_rest(logits.log_softmax(-1)).sum()
    (gradient,) = torch.autograd.grad(whole, logits)
    assert gradient.isfinite().all()


def test_the_store_holds_the_laws_along_every_response(pair, texts, tmp_path):
    distributions = store(tmp_path, pair, texts)
    distributions.make()
    for number in range(5):
        _, hidden, _ = along(pair, texts, number)
        expected = kept(pair.target_lm.logits(hidden).log_softmax(-1), 4)
        assert torch.equal(distributions[number]["ids"], expected.ids.int())
        torch.testing.assert_close(distributions[number]["log_probs"].double(), expected.log_probs, atol=1e-5, rtol=2e-3)
    assert (
        distributions.bytes() == 16 * 26 == sum(x.numel() * x.element_size() for n in range(5) for x in distributions[n].values())
    )


@pytest.mark.parametrize("shard_bytes", [1, 100, 2**28])
def test_shards_and_batches_of_any_size_hold_the_same(pair, texts, tmp_path, monkeypatch, shard_bytes):
    whole = store(tmp_path / "whole", pair, texts)
    whole.make()
    monkeypatch.setattr("specheads.storage.tensor_shards.SHARD_BYTES", shard_bytes)
    monkeypatch.setattr("specheads.training.distill.target_store.BATCH_TOKENS", 9)
    parts = store(tmp_path / "parts", pair, texts)
    parts.make()
    assert len(parts.parts) == {1: 5, 100: 4, 2**28: 1}[shard_bytes]
    for number in range(5):
        assert all(torch.equal(parts[number][name], whole[number][name]) for name in ("ids", "log_probs"))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_laws_that_are_cut_to_what_is_kept_lose_nothing(pair, texts, tmp_path, divergence):
    """Reverse KL alone sees less, as it weighs each token that the target rules out by the draft's own probability."""
    settings = LossSettings(divergence, top_k=4)
    distributions = store(tmp_path, pair, texts, settings)
    distributions.make()
    own, target, draft = along(pair, texts, 2)
    full = token_losses(pair.draft_lm, draft, laws_of(pair.target_lm, target, settings), own.learnt, settings)
    found = token_losses(pair.draft_lm, draft, stored_probs(**distributions[2]), own.learnt, settings)
    if divergence == "reverse_kl":
        log_draft = pair.draft_lm.logits(draft).log_softmax(-1)
        out = log_draft.scatter(1, distributions[2]["ids"].long(), -torch.inf)
        rest = out.logsumexp(-1)
        entropy = torch.where(out > -torch.inf, out.exp() * (out - rest[:, None]), 0.0).sum(-1)
        full = (full[0] - entropy, full[1])
    torch.testing.assert_close(found, full, atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_grouping_outcomes_never_shows_more_than_there_is(pair, texts, tmp_path, divergence):
    """By the data-processing inequality; the adaptive mix weighs by what it sees, so it is left out."""
    settings = LossSettings(divergence)
    own, target, draft = along(pair, texts, 2)
    full, _ = token_losses(pair.draft_lm, draft, laws_of(pair.target_lm, target, settings), own.learnt, settings)
    distributions = kept(pair.target_lm.logits(target).log_softmax(-1), 5)
    some, _ = token_losses(
        pair.draft_lm,
        draft,
        lambda piece: type(distributions)(distributions.log_probs[piece], distributions.ids[piece]),
        own.learnt,
        settings,
    )
    if divergence != "adaptive_mix":
        assert (some <= full + 1e-12).all() and (some < full - 1e-6).any()


def test_laws_are_made_once_and_a_damaged_shard_again(pair, texts, tmp_path, monkeypatch):
    store(tmp_path, pair, texts).make()
    calls, original = [], TargetStore._computed
    monkeypatch.setattr(TargetStore, "_computed", lambda self, name: calls.append(name) or original(self, name))
    store(tmp_path, pair, texts).make()
    assert not calls
    (shard,) = tmp_path.glob("laws/*/*.safetensors")
    before = shard.read_bytes()
    shard.write_bytes(before[:-3])
    store(tmp_path, pair, texts).make()
    assert calls and shard.read_bytes() == before


def test_other_texts_targets_and_laws_have_other_stores(pair, texts, tmp_path):
    prompts, responses = texts
    folders = {
        store(tmp_path, pair, texts).folder,
        store(tmp_path, pair, texts, top_k=5).folder,
        store(tmp_path, pair, texts, LossSettings(temperature=0.5)).folder,
        store(tmp_path, pair, (prompts, Responses(responses.tokens, [[1, 0], [4], [2, 3]]))).folder,
        TargetStore(tmp_path, pair.target_lm, ["tiny", "r2"], *texts, LossSettings(), 4).folder,
    }
    assert len(folders) == 5
    assert store(tmp_path, pair, texts, LossSettings("forward_kl")).folder in folders  # the loss does not change the law


def test_laws_are_kept_where_they_are_read_again_and_fit(pair, texts, tmp_path):
    distributions = store(tmp_path, pair, texts)
    assert distributions.is_wanted("auto", 1, num_reads=2) and not distributions.is_wanted("auto", 1, num_reads=1)
    assert not distributions.is_wanted("auto", 0, num_reads=2) and not distributions.is_wanted("recomputed", 1, num_reads=9)
    assert distributions.is_wanted("cached", 1, num_reads=1)
    with pytest.raises(UserError, match=r"target_probs.keep=cached would take .* target_probs.budget=0"):
        distributions.is_wanted("cached", 0, num_reads=2)


@pytest.mark.parametrize(
    ("given", "key"), [(("always", 4, 1), "keep=always"), (("auto", 0, 1), "top_k=0"), (("auto", 4, -1), "budget=-1")]
)
def test_settings_that_cannot_be_are_refused(given, key):
    with pytest.raises(UserError, match=f"target_probs.{key}"):
        check_target_probs(*given)
