"""The least bias that chances of acceptance allow, and what the rule reaches (Yin et al. 2024)."""

import pytest
import torch

from specheads.decoding.verification import Block
from specheads.papers import BiasedVerification

EPS = (0.0, 0.05, 0.3, 1.0)


def distributions(count=200, lacking=()):
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.rand(2, count, 5, generator=generator, dtype=torch.float64) ** 3
    target[::4, 0] = 0
    draft[:, lacking] = 0
    return draft / draft.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)


def emitted(rule, draft, target):
    """Return the distribution of the first token (N, V) and the probability of a rejection (N,),
    for distributions (N, V).
    """
    count, vocab_size = draft.shape
    probs = torch.zeros_like(draft)
    rejected = torch.zeros(count, dtype=torch.float64)
    for token in range(vocab_size):
        block = Block.of(
            torch.full((count, 1), token), draft[:, None], torch.stack([target, target], dim=1)
        )
        distribution = rule.distribution(block)
        passes = distribution.survival[:, 0]
        following = distribution.next_probs(torch.zeros(count, dtype=torch.long))
        probs[:, token] += draft[:, token] * passes
        probs += (
            (draft[:, token] * (1 - passes))[:, None] * following / following.sum(-1, keepdim=True)
        )
        rejected += draft[:, token] * (1 - passes)
    return probs, rejected


def total_variation(a, b):
    return (a - b).abs().sum(-1) / 2


@pytest.mark.parametrize("lacking", [(), (0, 3), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("eps", EPS)
def test_opt_reaches_the_least_bias_and_the_front(eps, lacking):
    draft, target = distributions(lacking=lacking)
    distribution, rejected = emitted(BiasedVerification(eps), draft, target)
    passes = ((target + eps) / draft.clamp_min(1e-300)).clamp_max(1)
    least = (target - passes * draft).abs().sum(-1) / 2 - ((1 - passes) * draft).sum(-1) / 2
    torch.testing.assert_close(total_variation(distribution, target), least, atol=1e-12, rtol=0)
    torch.testing.assert_close(rejected + least, total_variation(draft, target), atol=1e-12, rtol=0)


def test_without_a_margin_it_is_lossless():
    draft, target = distributions()
    assert (
        BiasedVerification(0.0).lossless
        and not BiasedVerification(0.0, "uno").lossless
        and not BiasedVerification(0.1).lossless
    )
    torch.testing.assert_close(
        emitted(BiasedVerification(0.0), draft, target)[0], target, atol=1e-12, rtol=0
    )
