"""The loss in slices is the plain one, values and gradients, and keeps no more than one slice."""

import pytest
import torch
from families import VOCAB_SIZE, family_pair

from specheads import Warp
from specheads.training.distill import distill_loss as loss_module
from specheads.training.distill.distill_loss import DIVERGENCES, computed_distributions, token_losses
from specheads.training.distill.settings import DistillLoss


@pytest.fixture(scope="module", params=["llama", "llama, tied", "gemma2"])
def pair(request):
    return family_pair(request.param)


def states(pair, seed=0):
    tokens = torch.randint(VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(seed))
    hidden = [lm.hidden_states(tokens, use_cache=False)[:, :-1].flatten(0, 1) for lm in (pair.draft_lm, pair.target_lm)]
    return tokens[:, 1:].flatten(), *hidden


def plain_losses(pair, tokens, draft_hidden, target_hidden, loss):
    logits = pair.draft_lm.logits(draft_hidden)
    target = (pair.target_lm.logits(target_hidden) / loss.temperature).log_softmax(-1)
    losses = DIVERGENCES[loss.divergence](target, (logits / loss.temperature).log_softmax(-1))
    return losses + loss.hard_weight * torch.nn.functional.cross_entropy(logits, tokens, reduction="none")


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "hard_weight": 0.3}])
def test_losses_and_gradients_in_slices_are_the_plain_ones(pair, divergence, more, monkeypatch):
    monkeypatch.setattr(loss_module, "SLICE_ELEMENTS", 4 * VOCAB_SIZE)
    loss = DistillLoss(divergence=divergence, **more)
    tokens, hidden, target_hidden = states(pair)
    weight = pair.draft.get_output_embeddings().weight
    results = []
    for sliced in (True, False):
        inputs, parameter = hidden.clone().requires_grad_(), weight.requires_grad_()
        if sliced:
            distributions = computed_distributions(pair.target_lm, target_hidden, loss)
            losses, overlaps = token_losses(pair.draft_lm, inputs, distributions, tokens, loss)
        else:
            losses = plain_losses(pair, tokens, inputs, target_hidden, loss)
        weighted = (losses * torch.linspace(0.5, 2, len(losses))).sum()
        results.append((losses, *torch.autograd.grad(weighted, (inputs, parameter))))
        weight.requires_grad_(False)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)
    t = Warp(loss.temperature)(pair.target_lm.logits(target_hidden))
    d = Warp(loss.temperature)(pair.draft_lm.logits(hidden))
    torch.testing.assert_close(overlaps, torch.minimum(t, d).sum(-1), atol=1e-12, rtol=0)


def test_no_distributions_are_kept_for_the_gradient(pair, monkeypatch):
    """What autograd keeps has the size of hidden states, not of distributions."""
    monkeypatch.setattr(loss_module, "SLICE_ELEMENTS", 4 * VOCAB_SIZE)
    loss = DistillLoss(divergence="forward_kl")
    tokens, hidden, target_hidden = states(pair)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.shape), x)[1], lambda x: x):
        distributions = computed_distributions(pair.target_lm, target_hidden, loss)
        losses, _ = token_losses(pair.draft_lm, hidden.requires_grad_(), distributions, tokens, loss)
    assert losses.requires_grad and not any(shape[-1:] == (VOCAB_SIZE,) for shape in kept if len(shape) > 1)
