"""The loss in pieces is the plain one, value and gradients, and holds no more than a piece."""

import pytest
import torch
from families import VOCAB_SIZE, family_pair

from specheads import UserError, Warp
from specheads.training.distill import distill_loss as loss_module
from specheads.training.distill.distill_loss import LossSettings, laws_of, most_to_gain, token_losses
from specheads.training.distill.divergences import DIVERGENCES


@pytest.fixture(scope="module", params=["llama", "llama, tied", "gemma2"])
def pair(request):
    return family_pair(request.param)


def states(pair, seed=0):
    tokens = torch.randint(VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(seed))
    hidden = [lm.hidden_states(tokens, use_cache=False)[:, :-1].flatten(0, 1) for lm in (pair.draft_lm, pair.target_lm)]
    return tokens[:, 1:].flatten(), *hidden


def plain(pair, tokens, draft_hidden, target_hidden, settings):
    logits = pair.draft_lm.logits(draft_hidden)
    target = settings.log_target(pair.target_lm.logits(target_hidden))
    value = settings.function(target, (logits / settings.temperature).log_softmax(-1))
    return value + settings.hard_weight * torch.nn.functional.cross_entropy(logits, tokens, reduction="none")


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "hard_weight": 0.3}, {"top_k": 5, "top_p": 0.9}])
def test_pieces_give_the_plain_loss_and_its_gradients(pair, divergence, more, monkeypatch):
    monkeypatch.setattr(loss_module, "SLICE_ELEMENTS", 4 * VOCAB_SIZE)
    settings = LossSettings(divergence, **more)
    tokens, hidden, target_hidden = states(pair)
    weight = pair.draft.get_output_embeddings().weight
    found = []
    for piecewise in (True, False):
        own, parameter = hidden.clone().requires_grad_(), weight.requires_grad_()
        if piecewise:
            values, shares = token_losses(pair.draft_lm, own, laws_of(pair.target_lm, target_hidden, settings), tokens, settings)
        else:
            values = plain(pair, tokens, own, target_hidden, settings)
        found.append((values, *torch.autograd.grad((values * torch.linspace(0.5, 2, len(values))).sum(), (own, parameter))))
        weight.requires_grad_(False)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)
    t = Warp(settings.temperature, settings.top_k, settings.top_p)(pair.target_lm.logits(target_hidden))
    d = Warp(settings.temperature)(pair.draft_lm.logits(hidden))
    torch.testing.assert_close(shares, torch.minimum(t, d).sum(-1), atol=1e-12, rtol=0)


def test_no_more_than_a_piece_is_kept_for_the_gradient(pair, monkeypatch):
    """What autograd keeps has the size of hidden states, not of laws."""
    monkeypatch.setattr(loss_module, "SLICE_ELEMENTS", 4 * VOCAB_SIZE)
    settings = LossSettings("forward_kl")
    tokens, hidden, target_hidden = states(pair)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.shape), x)[1], lambda x: x):
        values, _ = token_losses(
            pair.draft_lm, hidden.requires_grad_(), laws_of(pair.target_lm, target_hidden, settings), tokens, settings
        )
    assert values.requires_grad and not any(shape[-1:] == (VOCAB_SIZE,) for shape in kept if len(shape) > 1)


def test_the_tokens_with_most_to_gain_are_chosen():
    losses, reference = torch.tensor([3.0, 1.0, 2.0, 5.0]), torch.tensor([1.0, 0.5, 1.9, 4.9])
    assert most_to_gain(losses, reference, 0.5).tolist() == [True, True, False, False]
    assert most_to_gain(losses, reference, 0.01).sum() == 1 and most_to_gain(losses, reference, 1.0).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"divergence": "kl"}, "loss.divergence=kl"),
        ({"temperature": 0}, "loss.temperature=0"),
        ({"top_p": 0}, "top_p=0"),
        ({"hard_weight": -1}, "loss.hard_weight=-1"),
        ({"token_share": 0}, "loss.token_share=0"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        LossSettings(**given)
