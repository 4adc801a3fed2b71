"""Divergences against plain definitions in float64: values, gradients, and properties of all of
them.
"""

import pytest
import torch

from specheads import Warp
from specheads.training.distill.distill_loss import DIVERGENCES


def naive(name, t, d):
    """The definition, in probabilities."""
    if name == "forward_kl":
        t = t[:, (d > 0).all(0)]
        d = d[:, (d > 0).all(0)]
        return (
            torch.special.xlogy(t, t / t.sum(-1, keepdim=True)) - torch.special.xlogy(t, d)
        ).sum(-1)
    return (t - torch.minimum(t, d)).sum(-1)


def distributions(seed, spread=3.0, rows=8, vocab=11, lacking=()):
    logits = (
        torch.randn(
            2, rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        * spread
    )
    logits[1][:, lacking] = -torch.inf
    return logits[0], logits[1].requires_grad_()


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0])
@pytest.mark.parametrize("lacking", [(), (0, 3, 4, 5, 6, 7, 8, 9)], ids=["whole", "cut"])
def test_values_and_gradients_are_those_of_the_definition(name, spread, lacking):
    target, draft = distributions(0, spread, lacking=lacking)
    losses = DIVERGENCES[name](target.log_softmax(-1), draft.log_softmax(-1))
    expected = naive(name, target.softmax(-1), draft.softmax(-1))
    torch.testing.assert_close(losses, expected, atol=1e-10, rtol=1e-9)
    weights = torch.rand(
        len(losses), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    ours, theirs = (
        torch.autograd.grad((value * weights).sum(), draft, retain_graph=True)[0]
        for value in (losses, expected)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)
    assert ours.abs().max() > 0 and not ours[:, lacking].any()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_tokens_that_the_target_rules_out_have_finite_divergences(name):
    target, draft = distributions(3, spread=6.0)
    cut = Warp(1.0, top_k=3)(target).log()
    value = DIVERGENCES[name](cut, draft.log_softmax(-1))
    (gradient,) = torch.autograd.grad(value.sum(), draft)
    assert value.isfinite().all() and (value > 0).all() and gradient.isfinite().all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_half_precision_logits_of_a_large_vocabulary_are_safe(name):
    generator = torch.Generator().manual_seed(0)
    target, draft = (
        torch.randn(2, 150_000, generator=generator).mul(8).bfloat16() for _ in range(2)
    )
    draft.requires_grad_()
    value = DIVERGENCES[name](target.float().log_softmax(-1), draft.float().log_softmax(-1))
    (gradient,) = torch.autograd.grad(value.sum(), draft)
    exact = DIVERGENCES[name](
        target.double().log_softmax(-1), draft.detach().double().log_softmax(-1)
    )
    torch.testing.assert_close(value.double(), exact, atol=1e-4, rtol=1e-4)
    assert gradient.isfinite().all()
