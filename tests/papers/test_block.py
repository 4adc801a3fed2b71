"""Greedy block verification in the decoder: modifications go from round to round, with the distributions they need."""

import copy
import math

import pytest
import torch
from chains import greedy_block_verification
from fakes import constant_head, tiny_pair

from specheads import SpeculativeDecoder, UserError, Warp, stopping
from specheads.decoding.verification.rule import Block
from specheads.papers import GreedyBlockVerification
from specheads.papers.block import (
    Levels,
    NestedDistribution,
    _modified,
    _modified_targets,
)


class Spy(GreedyBlockVerification):
    """Keeps what every round was given and what it gave."""

    def __init__(self, num_levels=4):
        super().__init__(num_levels)
        self.rounds = []

    def __call__(self, state, block, uniform, next_uniform):
        verdict, after = super().__call__(state, block, uniform, next_uniform)
        self.rounds.append(copy.deepcopy((state, block, verdict, after)))  # the decoder writes over them
        return verdict, after


class Alternating(stopping.FixedLength):
    """Lengths that are known beforehand and change from round to round, so that modifications reach beyond the next draft."""

    compile_key = "alternating"

    def __init__(self):
        super().__init__(5)

    def end_round(self, state, num_drafted, num_accepted):
        return super().end_round(state, num_drafted, num_accepted)._replace(num_tokens=6 - state.num_tokens)


@pytest.mark.parametrize("num_levels", [1, 4])
def test_levels_are_carried_from_round_to_round_with_the_distributions_they_need(num_levels):
    pair, prompt = tiny_pair(vocab_size=4, scale=1.5), [0, 1]
    rule = Spy(num_levels)
    decoder = SpeculativeDecoder(pair, stopping=Alternating(), verification=rule, warp=Warp(), engine="eager")
    short = 0
    for seed in range(20):
        rule.rounds.clear()
        out = decoder.generate(prompt, 25, seed=seed)
        before, text = rule.start_prompt(1, torch.device("cpu")), list(prompt)
        for number, ((state, block, verdict, after), made) in enumerate(zip(rule.rounds, out.rounds, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
            length, accepted = block.lengths.item(), verdict.num_accepted.item()
            assert block.planned.item() == min((5, 1)[number % 2], 25 - (len(text) - len(prompt)) - 1)
            if before.num_probs_needed > length:  # the distribution after the draft is there, at the price of a forward pass
                short += 1
                full = torch.tensor([[*text, *block.tokens[0, :length].tolist()]])
                distribution = pair.draft(full).logits[0, -1].softmax(dim=-1)
                torch.testing.assert_close(block.draft_probs[0, length], distribution, atol=1e-10, rtol=0)
                assert made.num_draft_calls == length + 1
            else:
                assert made.num_draft_calls == length
            # What a rejection modifies reaches as far as the block would have, unless it changes nothing or finds no room.
            assert (
                after.num_probs_needed.item() <= max(before.num_probs_needed.item(), length) - accepted - 1
                or after.num_probs_needed.item() == 0
            )
            before, text = after, text + list(made.tokens)
    assert short > 0


def test_drafts_of_unknown_length_modify_nothing():
    rule = Spy()
    head = stopping.HeadThreshold(constant_head(0.7), 0.5)
    SpeculativeDecoder(tiny_pair(), stopping=head, verification=rule, engine="eager").generate([0, 1], 30)
    assert all(block.planned.item() == 0 and after.num_probs_needed.item() == 0 for _, block, _, after in rule.rounds)


@pytest.mark.parametrize("levels", [0, 1.5, True])
def test_an_impossible_number_of_levels_is_refused(levels):
    with pytest.raises(UserError, match="verification.num_levels"):
        GreedyBlockVerification(levels)


def random_block(batch, count, vocab_size=4, planned=None, seed=0):
    """Return a block of `count` drafted tokens, with the draft's distribution after the last one."""
    generator = torch.Generator().manual_seed(seed)
    target, draft = torch.rand(2, batch, count + 1, vocab_size, generator=generator, dtype=torch.float64).softmax(dim=-1)
    tokens = torch.randint(vocab_size, (batch, count), generator=generator)
    return Block.of(tokens, draft, target, None, planned)


def test_a_modification_is_what_is_left_of_the_target_and_none_where_nothing_is():
    target, draft = torch.tensor([[0.5, 0.3, 0.2]] * 4), torch.tensor([[0.2, 0.6, 0.2]] * 4)
    log_ratio = torch.tensor([1.0, 3.0, 0.1, 0.0], dtype=torch.float64).log()
    left = torch.tensor([1, 0, 1, 2])
    result = _modified(target, draft, log_ratio, left)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.stack([torch.tensor([1.0, 0.0, 0.0]), *target[1:]]))
    torch.testing.assert_close(_modified(target, draft, log_ratio, left + 1)[1], torch.tensor([1.3, 0.3, 0.4]) / 2)


def test_without_levels_the_target_stays_as_it_is():
    block = random_block(2, 3)
    target, levels = _modified_targets(Levels.none(2, 0, torch.device("cpu")), block)
    assert torch.equal(target, block.target_probs) and levels.left.shape == levels.log_ratio.shape == (2, 0, 4)
    generator = torch.Generator().manual_seed(0)
    empty = torch.zeros(2, 0, dtype=torch.long)
    verdict, after = greedy_block_verification(empty, torch.zeros(2, 0, 3), torch.eye(3)[torch.tensor([[1], [2]])], generator)
    assert verdict.num_accepted.tolist() == [0, 0] and verdict.next_token.tolist() == [1, 2] and after.left.shape == (2, 0)


def test_each_row_modifies_if_it_has_a_free_level_and_a_known_length():
    left = torch.tensor([[2, 3], [2, 0], [0, 0], [0, 0]])
    levels = Levels(torch.zeros(4, 2, dtype=torch.float64), left)
    nested = NestedDistribution.of(levels, random_block(4, 3, planned=torch.tensor([3, 3, 3, 0])))
    assert nested.modifies.tolist() == [False, True, True, False]


def test_a_block_that_is_accepted_whole_leaves_its_levels_free():
    target = torch.rand(2, 4, 4, dtype=torch.float64).softmax(dim=-1)
    block = Block.of(torch.tensor([[0, 1, 2], [3, 2, 1]]), target, target, None, torch.tensor([3, 3]))
    verdict, after = GreedyBlockVerification()(
        Levels.none(2, 2, torch.device("cpu")), block, torch.tensor([0.5, 0.9]), torch.tensor([0.1, 0.2])
    )
    assert verdict.num_accepted.tolist() == [3, 3] and after.left.tolist() == [[0, 0], [0, 0]]


def test_a_rejection_modifies_up_to_the_end_of_its_block():
    """The draft proposes what the target never says; the level after it reaches over what was planned beyond the next token."""
    target = torch.tensor([[[0.0, 1.0]] * 4] * 2, dtype=torch.float64)
    draft = torch.tensor([[[0.5, 0.5]] * 4] * 2, dtype=torch.float64)
    block = Block.of(torch.tensor([[0, 1, 1], [1, 1, 0]]), draft, target, None, torch.tensor([3, 3]))
    verdict, after = GreedyBlockVerification()(
        Levels.none(2, 2, torch.device("cpu")), block, torch.tensor([0.999, 0.999]), torch.tensor([0.1, 0.2])
    )
    assert verdict.num_accepted.tolist() == [0, 2]
    assert after.left.tolist() == [[2, 0], [0, 0]]
    assert after.log_ratio.tolist() == [[pytest.approx(math.log(2)), 0], [0, 0]]
