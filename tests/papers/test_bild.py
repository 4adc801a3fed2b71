"""BiLD on hand-worked cases."""

import torch
from fakes import tiny_pair

from specheads import SpeculativeDecoder, stopping
from specheads.decoding.verification import Block
from specheads.papers import BigLittle


def test_drafts_are_rolled_back_to_the_first_unlikely_token():
    target = torch.tensor([[[0.5, 0.5], [0.95, 0.05], [0.2, 0.8], [0.5, 0.5]]])
    block = Block.of(torch.tensor([[0, 1, 1]]), target[:, :3], target)
    distribution = BigLittle(0.5, rollback=2.0).distribution(block)
    assert distribution.survival.tolist() == [[1, 0, 0]]  # -log 0.05 = 3.0
    assert distribution.next_probs(torch.tensor([1])).tolist() == target[:, 1].tolist()
    assert BigLittle(0.5, rollback=3.0).distribution(block).survival.tolist() == [[1, 1, 1]]


def test_the_target_takes_over_where_the_draft_is_unsure():
    draft = torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.1, 0.9]]])
    block = Block.of(torch.tensor([[0, 0, 1]]), draft, torch.full((1, 4, 2), 0.5))
    assert BigLittle(0.7).distribution(block).survival.tolist() == [[1, 0, 0]]
    assert BigLittle(0.5).distribution(block).survival.tolist() == [[1, 1, 1]]


def test_its_fallback_is_the_stopping_rule_unless_another_is_chosen():
    pair = tiny_pair()
    rule = SpeculativeDecoder(pair, verification=BigLittle(fallback=0.7, max_tokens=6)).stopping
    assert isinstance(rule, stopping.MaxProbability)
    assert (rule.threshold, rule.max_tokens) == (0.7, 6)
    assert (
        SpeculativeDecoder(
            pair, stopping=stopping.FixedLength(2), verification=BigLittle()
        ).stopping.max_tokens
        == 2
    )
