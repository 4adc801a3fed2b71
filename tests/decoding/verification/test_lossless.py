"""What comes out follows the target's distribution: by enumeration through the distributions that
decoding samples from.
"""

import pytest
import torch
from chains import Model, Warped, difference, emitted_distribution, expected_accepted

from specheads.decoding.verification import (
    BlockVerification,
    TokenVerification,
    block_distribution,
    prefix_distribution,
    token_distribution,
)
from specheads.pair.sampling import Warp
from specheads.papers import BiasedVerification

SHAPES = [(2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2)]


def pairs(vocab_size, count):
    """Return random pairs of models, half of them adversarial."""
    return [
        (Model(vocab_size, 2 * n, n % 2 == 1), Model(vocab_size, 2 * n + 1, n % 4 > 1))
        for n in range(count)
    ]


@pytest.mark.parametrize(("vocab_size", "num_drafted"), SHAPES)
@pytest.mark.parametrize(
    "rule",
    [TokenVerification(), BlockVerification(), BiasedVerification(0.0)],
    ids=lambda r: r.label,
)
def test_the_emitted_tokens_follow_the_target(rule, vocab_size, num_drafted):
    assert rule.lossless
    for target, draft in pairs(vocab_size, 8):
        assert (
            difference(
                emitted_distribution(rule, target, draft, num_drafted, num_drafted + 1), target
            )
            < 1e-9
        )


WARPS = [Warp(), Warp(0.7, top_k=2), Warp(1.0, top_p=0.6), Warp(0)]


@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize(
    "rule",
    [TokenVerification(), BlockVerification(), BiasedVerification(0.0)],
    ids=lambda r: r.name,
)
def test_drafts_whose_output_lacks_tokens(rule, warp):
    """The tokens that the target likes least at the start, all but one, and a single one.

    At a temperature of the draft.
    """
    apart = 0
    for seed in range(2):
        target = Warped(Model(4, 2 * seed, adversarial=seed == 1), warp)
        disliked = target.model(()).argsort().tolist()
        for kept in (disliked[:2], range(1, 4), [2]):
            draft = Warped(Model(4, 2 * seed + 1), warp, kept, temperature=0.8)
            assert difference(emitted_distribution(rule, target, draft, 2, 3), target) < 1e-9
            apart += not torch.minimum(target(()), draft(())).any()
    assert apart > 0 or warp == Warp()  # no token that the draft has may follow at the start


def test_a_walk_that_is_not_reflected_would_be_noticed():
    """It accepts as many tokens of a block as any rule, and is off by about 0.02 in total variation
    over several.
    """
    target = Model(2, 0)
    draft = Model(2, 1)

    class Greedy(BlockVerification):
        def distribution(self, block):
            return prefix_distribution(block, block.log_ratios().cumsum(dim=1))

    assert difference(emitted_distribution(Greedy(), target, draft, 3, 4), target) > 1e-3


class Same:
    """The same distribution after every prefix."""

    def __init__(self, *probs):
        self.probs = torch.tensor(probs, dtype=torch.float64)
        self.vocab_size = len(probs)

    def __call__(self, prefix):
        return self.probs

    joint = Model.joint
    in_round = Model.in_round


@pytest.mark.parametrize(
    ("distribution_of", "ninths"), [(token_distribution, 10), (block_distribution, 11)]
)
def test_the_worked_example(distribution_of, ninths):
    actual = expected_accepted(distribution_of, Same(1 / 3, 2 / 3), Same(2 / 3, 1 / 3), 2)
    assert actual == pytest.approx(ninths / 9, abs=1e-12)
