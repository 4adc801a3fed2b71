"""The loss in slices is the plain one, values and gradients, and keeps no more than one slice."""

from dataclasses import replace

import pytest
import torch
from families import VOCAB_SIZE, family_pair

from specheads import Warp
from specheads.pair.draft_vocabulary import keep_tokens
from specheads.training.distill import distill_loss as loss_module
from specheads.training.distill.distill_loss import (
    DIVERGENCES,
    computed_distributions,
    most_likely,
    stored_distributions,
    token_losses,
)


@pytest.fixture(
    scope="module", params=["llama", "llama, tied", "gemma2", "llama, cut", "gemma2, cut"]
)
def pair(request):
    """A pair; the output of a draft that is cut has every third token."""
    pair = family_pair(request.param.removesuffix(", cut"))
    if request.param.endswith("cut"):
        keep_tokens(pair.draft, torch.arange(0, VOCAB_SIZE, 3))
    return replace(pair)


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(loss_module, "SLICE_ELEMENTS", 4 * VOCAB_SIZE)


def states(pair, seed=0):
    tokens = torch.randint(VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(seed))
    return [
        lm.hidden_states(tokens, use_cache=False)[:, :-1].flatten(0, 1)
        for lm in (pair.draft_lm, pair.target_lm)
    ]


def plain_losses(pair, draft_hidden, target_hidden, divergence):
    target = pair.target_lm.logits(target_hidden)
    draft = pair.draft_lm.logits(draft_hidden)
    return DIVERGENCES[divergence](target.log_softmax(-1), draft.log_softmax(-1))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_losses_and_gradients_in_slices_are_the_plain_ones(pair, divergence, small_slices):
    hidden, target_hidden = states(pair)
    weight = pair.draft.get_output_embeddings().weight
    results = []
    for sliced in (True, False):
        inputs = hidden.clone().requires_grad_()
        parameter = weight.requires_grad_()
        if sliced:
            distributions = computed_distributions(pair.target_lm, target_hidden)
            losses, overlaps = token_losses(pair.draft_lm, inputs, distributions, divergence)
        else:
            losses = plain_losses(pair, inputs, target_hidden, divergence)
        weighted = (losses * torch.linspace(0.5, 2, len(losses))).sum()
        results.append((losses, *torch.autograd.grad(weighted, (inputs, parameter))))
        weight.requires_grad_(False)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)
    t, d = (
        Warp()(lm.logits(x)) for lm, x in ((pair.target_lm, target_hidden), (pair.draft_lm, hidden))
    )
    torch.testing.assert_close(overlaps, torch.minimum(t, d).sum(-1), atol=1e-12, rtol=0)


def test_no_distributions_are_kept_for_the_gradient(pair, small_slices):
    """What autograd keeps has the size of hidden states, not of distributions."""
    hidden, target_hidden = states(pair)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (kept.append(x.shape), x)[1], lambda x: x
    ):
        distributions = computed_distributions(pair.target_lm, target_hidden)
        losses, _ = token_losses(
            pair.draft_lm, hidden.requires_grad_(), distributions, "forward_kl"
        )
    assert losses.requires_grad and not any(
        shape[-1:] == (VOCAB_SIZE,) for shape in kept if len(shape) > 1
    )


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_losses_from_stored_distributions_are_those_of_all_logits(pair, divergence):
    hidden, target_hidden = states(pair)
    stored = most_likely(pair.target_lm.logits(target_hidden).log_softmax(-1), 5)
    losses, overlaps = token_losses(
        pair.draft_lm, hidden, stored_distributions(stored.ids, stored.log_probs), divergence
    )
    draft = stored.same_outcomes(pair.draft_lm.logits(hidden).log_softmax(-1))
    torch.testing.assert_close(
        losses, DIVERGENCES[divergence](stored.log_probs.float(), draft), atol=1e-6, rtol=1e-5
    )
    shared = torch.minimum(stored.log_probs.exp(), draft.exp()).sum(-1)
    torch.testing.assert_close(overlaps, shared, atol=1e-6, rtol=0, check_dtype=False)


@torch.no_grad()
def test_logits_of_some_tokens_are_those_of_all(pair):
    _, hidden = states(pair)
    tokens = torch.tensor([0, 3, VOCAB_SIZE - 1])
    target = pair.target_lm
    torch.testing.assert_close(
        target.logits_of(hidden, tokens), target.logits(hidden)[:, tokens], atol=1e-12, rtol=0
    )
