"""What one token adds to block verification, against the law of whole blocks summed over all that may follow the token."""

import itertools
import math

import pytest
import torch

from specheads.decoding.verification.block import block_law, reflected, token_by_token
from specheads.decoding.verification.law import Block

VOCABULARY, LENGTH = 3, 3


def random_laws(seed):
    """Laws (V,) of draft and target behind every text of up to LENGTH tokens; the target finds some tokens impossible."""
    generator = torch.Generator().manual_seed(seed)
    laws = {}
    for length in range(LENGTH + 1):
        for text in itertools.product(range(VOCABULARY), repeat=length):
            draft, target = torch.rand(2, VOCABULARY, generator=generator, dtype=torch.float64)
            target = target * (torch.rand(VOCABULARY, generator=generator) < 0.8) + 1e-300
            laws[text] = draft / draft.sum(), target / target.sum()
    return laws


def block_of(laws, tokens):
    behind = [laws[tokens[:i]] for i in range(len(tokens) + 1)]
    draft, target = (torch.stack([both[side] for both in behind])[None] for side in (0, 1))
    return Block.of(torch.tensor([tokens]), draft, target)


@pytest.mark.parametrize("seed", range(4))
def test_the_chances_are_those_of_whole_blocks_whatever_follows(seed):
    """P(at least i accepted | y_1 .. y_i) and P(at least i - 1 accepted | y_1 .. y_i), by enumeration of the later tokens."""
    laws, seen = random_laws(seed), []
    for length in range(1, LENGTH + 1):
        for tokens in itertools.product(range(VOCABULARY), repeat=length):
            accepted, alive = (values[0, -1].item() for values in token_by_token(block_of(laws, tokens)))
            for longer in range(length, LENGTH + 1):
                reach = {length: 0.0, length - 1: 0.0}
                for rest in itertools.product(range(VOCABULARY), repeat=longer - length):
                    whole = tokens + rest
                    chance = math.prod(laws[whole[:i]][0][whole[i]].item() for i in range(length, longer))
                    survival = [1.0, *block_law(block_of(laws, whole)).survival[0].tolist()]
                    for count in reach:
                        reach[count] += chance * survival[count]
                assert alive == pytest.approx(reach[length - 1], abs=1e-12)
                assert accepted * alive == pytest.approx(reach[length], abs=1e-12)
            seen.append((accepted, alive))
    assert any(0.05 < a < 0.95 and 0.05 < b < 0.95 for a, b in seen)


def test_a_case_by_hand():
    """t/d is 1/2 at the first token and 3/2 at the second: p = (1/2, 3/4); the first token's own test passes with 1/9 or so."""
    draft = torch.tensor([[[0.8, 0.2], [0.4, 0.6]]], dtype=torch.float64)
    target = torch.tensor([[[0.4, 0.6], [0.6, 0.4], [0.5, 0.5]]], dtype=torch.float64)
    accepted, alive = token_by_token(Block.of(torch.tensor([[0, 0]]), draft, target))
    # E = (0.5 * 0.6 - 0.4)+ + (0.5 * 0.4 - 0.6)+ = 0: alone the first token does not pass
    assert alive[0].tolist() == pytest.approx([1.0, 0.75]) and accepted[0].tolist() == pytest.approx([0.5, 1.0])
    target[0, 1] = torch.tensor([0.1, 0.9])  # t/d = 1/4: p_2 = 1/8, E = 0, and then only what passes as a whole survives
    accepted, alive = token_by_token(Block.of(torch.tensor([[0, 0]]), draft, target))
    assert alive[0].tolist() == pytest.approx([1.0, 0.125]) and accepted[0].tolist() == pytest.approx([0.5, 1.0])
    draft[0, 1] = torch.tensor([0.9, 0.1])  # t/d = 1/9: p_2 = 1/18, E = 0.45 - 0.1 = 0.35, the first alone 0.35 / 0.85 = 7/17
    accepted, alive = token_by_token(Block.of(torch.tensor([[0, 0]]), draft, target))
    assert alive[0].tolist() == pytest.approx([1.0, 1 / 18 + 17 / 18 * 7 / 17])
    assert accepted[0].tolist() == pytest.approx([0.5, 1 / 18 / (1 / 18 + 7 / 18)])


def test_the_ratio_of_running_ratios_cut_off_at_one_is_token_verifications_own():
    log_ratios = torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    after = reflected(log_ratios)
    before = torch.nn.functional.pad(after, (1, 0))[:, :-1]
    torch.testing.assert_close((after - before).clamp_max(0), log_ratios.clamp_max(0))


def test_after_a_token_that_the_target_rules_out_there_is_nothing_to_accept():
    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    block = Block.of(torch.tensor([[0, 1]]), torch.full((1, 2, 2), 0.5, dtype=torch.float64), target)
    accepted, alive = token_by_token(block)
    assert accepted.tolist() == [[0.0, 0.0]] and alive.tolist() == [[1.0, 0.0]]
