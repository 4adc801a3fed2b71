"""The step after the target's forward pass: what it hands to the rule, and what the host reads from
its tensor.
"""

import pytest
import torch

from specheads import Warp
from specheads.decoding.rounds import StepResult, VerifyStep
from specheads.decoding.step_inputs import DraftMemory
from specheads.decoding.verification import TokenVerification, VerificationRule

NUM_ROWS = 3
NUM_DRAFTED = 4
VOCAB_SIZE = 5
LENGTHS = torch.tensor([4, 1, 0])
UNIFORMS = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], dtype=torch.float64)


class Spy(VerificationRule):
    """Keeps what it is given; its verdict is the number of the row and ten more."""

    compile_key = "spy"
    given = ()

    def distribution(self, block):
        self.given = (block,)
        return self

    def decide(self, uniform, next_uniform):
        self.given += uniform, next_uniform
        rows = torch.arange(len(uniform))
        return rows, rows + 10


def distributions(num_positions):
    generator = torch.Generator().manual_seed(num_positions)
    return torch.rand(NUM_ROWS, num_positions, VOCAB_SIZE, generator=generator).softmax(dim=-1)


def step_of(rule, num_rows=1):
    return VerifyStep(
        Warp(0.7), rule, DraftMemory(6, VOCAB_SIZE, torch.float32, torch.device("cpu"), num_rows)
    )


def decided(rule, draft_probs, target_probs, lengths=LENGTHS):
    """Return the step's results, row by row."""
    tokens = torch.arange(NUM_ROWS * NUM_DRAFTED).reshape(NUM_ROWS, NUM_DRAFTED) % VOCAB_SIZE
    packed = step_of(rule).decide(tokens, draft_probs, target_probs, UNIFORMS, lengths)
    assert packed.dtype == torch.long and packed[:, 4:].tolist() == tokens.tolist()
    return [StepResult.unpacked(row) for row in packed.tolist()]


@pytest.mark.parametrize("place", range(NUM_DRAFTED))
def test_nan_counts_in_the_distributions_of_drafted_tokens(place):
    draft_probs = distributions(NUM_DRAFTED)
    draft_probs[:, place] = torch.nan
    results = decided(Spy(), draft_probs, distributions(NUM_DRAFTED + 1))
    assert [result.draft_nan for result in results] == [place < count for count in (4, 1, 0)]
    assert not any(result.target_nan for result in results)


@pytest.mark.parametrize("place", range(NUM_DRAFTED + 1))
def test_nan_of_the_target_counts_anywhere(place):
    target_probs = distributions(NUM_DRAFTED + 1)
    target_probs[1, place] = torch.nan
    results = decided(Spy(), distributions(NUM_DRAFTED), target_probs)
    assert [result.target_nan for result in results] == [False, True, False]
    assert not any(result.draft_nan for result in results)


def test_tokens_beyond_the_length_of_a_draft_do_not_matter():
    probs = distributions(NUM_DRAFTED + 1)
    results = decided(TokenVerification(), probs[:, :NUM_DRAFTED], probs, torch.tensor([1, 0, 4]))
    assert [result.num_accepted for result in results] == [1, 0, 4]
