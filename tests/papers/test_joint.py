"""Joint verification on hand-worked chains."""

import pytest
import torch

from specheads.decoding.verification import Block
from specheads.papers import JointVerification


def chain(drafted, wanted, lengths=None):
    """A chain of token 0 with these probabilities under draft and target."""
    distributions = []
    for probs in (drafted, [*wanted, 0.5]):
        probs = torch.tensor(probs, dtype=torch.float64)
        distributions.append(torch.stack([probs, 1 - probs], dim=1)[None])
    tokens = torch.zeros(1, len(drafted), dtype=torch.long)
    return Block.of(tokens, *distributions, None if lengths is None else torch.tensor([lengths]))


@pytest.mark.parametrize(
    ("drafted", "wanted", "threshold", "accepted"),
    [
        ([0.5, 0.5], [0.5, 0.5], 0.1, 2),  # ratios 1, 1
        ([0.8, 0.5], [0.04, 0.5], 0.1, 0),  # 0.05, 0.05
        ([0.8, 0.1], [0.04, 0.9], 0.1, 2),  # 0.05 fails, 0.45 passes: the longer prefix is accepted
        ([0.8, 0.1, 0.9], [0.04, 0.9, 0.01], 0.1, 2),  # 0.05, 0.45, 0.005
        ([0.8, 0.1, 0.9, 0.1], [0.04, 0.9, 0.1, 0.9], 0.4, 4),  # 0.05, 0.45, 0.05, 0.45
        ([0.2, 0.9], [0.8, 0.3], 0.9, 2),  # min(1, 4), min(1, 1.33)
        ([0.5, 0.5], [0.25, 0.5], 0.5, 0),  # 0.5 does not exceed 0.5
        ([0.9, 0.9], [1.0, 1.0], 1.0, 0),  # nothing exceeds 1
        ([0.9, 0.9, 0.9], [1e-9, 1e-9, 1e-9], 0.0, 3),  # all that is possible exceeds 0
        # A token that is impossible under the target is never accepted
        ([0.5, 0.5], [0.0, 1.0], 0.0, 0),
    ],
)
def test_the_longest_prefix_that_is_likely_enough_is_accepted(drafted, wanted, threshold, accepted):
    distribution = JointVerification(threshold).distribution(chain(drafted, wanted))
    assert distribution.length_probs[0].tolist() == [
        float(n == accepted) for n in range(len(drafted) + 1)
    ]
    num_accepted, _ = distribution.decide(torch.tensor([0.5]), torch.tensor([0.3]))
    assert num_accepted.item() == accepted


def test_the_next_token_follows_the_target():
    block = chain([0.8, 0.1], [0.04, 0.9])
    distribution = JointVerification(0.1).distribution(block)
    for accepted in range(3):
        assert torch.equal(
            distribution.next_probs(torch.tensor([accepted])), block.target_probs[:, accepted]
        )


def test_nothing_is_accepted_beyond_a_rows_length():
    distribution = JointVerification(0.1).distribution(
        chain([0.5, 0.5, 0.5], [0.5, 0.5, 0.5], lengths=2)
    )
    assert distribution.length_probs[0].tolist() == [0, 0, 1, 0]
