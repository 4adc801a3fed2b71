"""What all rules for chains share: shapes, numerics, and samples that follow the distribution."""

import itertools

import pytest
import torch
from statistics_helper import chi_square_p_value, uniforms

from specheads import Warp
from specheads.decoding.verification import (
    Block,
    BlockVerification,
    SyntheticVerification,
    TokenVerification,
    block_distribution,
    compared,
    reflected,
    token_distribution,
)
from specheads.papers import BiasedVerification, BigLittle

RULES = [
    TokenVerification(),
    BlockVerification(),
    BiasedVerification(0.2),
    BiasedVerification(0.2, "uno"),
    BigLittle(),
]
DISTRIBUTIONS = {"token": token_distribution, "block": block_distribution}
named = {"ids": lambda rule: rule.label}


def random_block(
    batch, num_drafted, vocab_size, warp=None, seed=0, dtype=torch.float32, spread=2.0
):
    """A drafted block of related models."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(
        batch, num_drafted + 1, vocab_size, generator=generator, dtype=dtype
    )
    other = logits + torch.randn(logits.shape, generator=generator, dtype=dtype)
    draft, target = ((warp or Warp())(x) for x in (logits, other))
    tokens = torch.multinomial(draft[:, :-1].flatten(0, 1), 1, generator=generator).reshape(
        batch, num_drafted
    )
    return Block.of(tokens, draft[:, :-1], target)


def verified(rule, block, seed=1):
    return rule.distribution(block).decide(
        *uniforms((2, len(block.tokens)), torch.Generator().manual_seed(seed))
    )


@pytest.mark.parametrize("rule", RULES, **named)
def test_an_empty_draft_gives_the_targets_token(rule):
    block = Block.of(
        torch.empty(1, 0, dtype=torch.long), torch.empty(1, 0, 4), torch.eye(4)[torch.tensor([[2]])]
    )
    num_accepted, next_token = verified(rule, block)
    assert (num_accepted.item(), next_token.item()) == (0, 2)


@pytest.mark.parametrize("rule", [each for each in RULES if each.compares], **named)
def test_at_temperature_0_comparing_tokens_decides_as_distributions_do(rule):
    """Every draft of up to three tokens over three letters, against every target."""
    eye = torch.eye(3)
    count = 0
    for best in itertools.product(range(3), repeat=4):
        for drafted in itertools.product(range(3), repeat=3):
            for length in range(4):
                tokens = torch.tensor([drafted])
                lengths = torch.tensor([length])
                block = Block.of(tokens, eye[tokens], eye[torch.tensor([best])], lengths)
                expected = rule.distribution(block).decide(*torch.rand(2, 1, dtype=torch.float64))
                decided = compared(tokens, torch.tensor([best]), lengths)
                assert all(map(torch.equal, decided, expected))
                count += expected[0].item()
    assert count


@pytest.mark.parametrize("rule", RULES, **named)
def test_verdicts_are_on_the_device_of_the_distributions(rule):
    """On "meta", where a tensor that is made elsewhere is refused, as one on the CPU next to a
    GPU's.
    """
    meta = torch.device("meta")
    tokens = torch.zeros(2, 3, dtype=torch.long, device=meta)
    block = Block.of(tokens, torch.rand(2, 3, 5, device=meta), torch.rand(2, 4, 5, device=meta))
    num_accepted, next_token = rule.distribution(block).decide(
        *torch.rand(2, 2, dtype=torch.float64, device=meta)
    )
    assert {num_accepted.device, next_token.device} == {meta}


@pytest.mark.parametrize("rule", [r for r in RULES if r.lossless], **named)
def test_equal_distributions_accept_everything(rule):
    block = random_block(64, 4, 11)
    equal = Block.of(
        block.tokens,
        block.draft_probs,
        torch.cat([block.draft_probs, block.target_probs[:, -1:]], dim=1),
    )
    assert verified(rule, equal)[0].tolist() == [4] * 64


@pytest.mark.parametrize("rule", [*RULES[:2], BiasedVerification(0.0), RULES[4]], **named)
def test_point_masses_compare_prefixes(rule):
    """Temperature 0: the drafted tokens up to the first that is not the target's, whatever the
    uniform numbers.
    """
    generator = torch.Generator().manual_seed(3)
    wanted = torch.randint(3, (400, 5), generator=generator)
    drafted = torch.where(
        torch.rand(400, 5, generator=generator) < 0.7,
        wanted,
        torch.randint(3, (400, 5), generator=generator),
    )
    num_accepted, next_token = verified(
        rule, Block.of(drafted[:, :4], torch.eye(3)[drafted[:, :4]], torch.eye(3)[wanted])
    )
    same = (drafted == wanted)[:, :4].long().cumprod(dim=1).sum(dim=1)
    assert num_accepted.tolist() == same.tolist()
    assert next_token.tolist() == wanted[torch.arange(400), same].tolist()


@pytest.mark.parametrize("rule", RULES, **named)
@pytest.mark.parametrize(
    "warp", [Warp(top_k=50), Warp(temperature=0), Warp(top_p=0.5)], ids=["top-k", "greedy", "top-p"]
)
def test_large_vocabularies_with_exact_zeros(rule, warp):
    block = random_block(3, 6, 150_000, warp, spread=5.0)
    for dtype in (torch.float32, torch.bfloat16):
        distributions = (x.to(dtype) for x in (block.draft_probs, block.target_probs))
        num_accepted, next_token = verified(rule, Block.of(block.tokens, *distributions))
        assert ((num_accepted >= 0) & (num_accepted <= 6)).all()
        assert (block.target_probs[torch.arange(3), num_accepted, next_token] > 0).all()


@pytest.mark.parametrize(
    "distribution_of", [*DISTRIBUTIONS.values(), *(rule.distribution for rule in RULES[2:])]
)
def test_ragged_lengths_act_as_shorter_blocks(distribution_of):
    block = random_block(40, 4, 7, dtype=torch.float64)
    lengths = torch.arange(40) % 5
    distribution = distribution_of(
        Block.of(block.tokens, block.draft_probs, block.target_probs, lengths)
    )
    for row, length in enumerate(lengths.tolist()):
        here = slice(row, row + 1)
        shorter = Block.of(
            block.tokens[here, :length],
            block.draft_probs[here, :length],
            block.target_probs[here, : length + 1],
        )
        alone = distribution_of(shorter)
        assert distribution.survival[row, length:].sum() == 0
        torch.testing.assert_close(distribution.survival[row, :length], alone.survival[0])
        for accepted in range(length + 1):
            n = torch.full((40,), accepted)
            torch.testing.assert_close(distribution.next_probs(n)[row], alone.next_probs(n[:1])[0])


def test_half_precision_distributions_are_verified_in_float32():
    block = random_block(8, 4, 20)
    half = Block.of(block.tokens, block.draft_probs.bfloat16(), block.target_probs.bfloat16())
    for distribution_of in DISTRIBUTIONS.values():
        distribution = distribution_of(half)
        assert distribution.next_probs(torch.zeros(8, dtype=torch.long)).dtype == torch.float32
        assert torch.allclose(
            distribution.survival.float(), distribution_of(block).survival.float(), atol=0.1
        )


def test_a_reflected_walk_is_the_running_minimum_with_one():
    steps = torch.randn(200, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    steps[::7, 4] = -torch.inf
    walk = reflected(steps)
    p = torch.zeros(200, dtype=torch.float64)
    for i in range(9):
        p = (p + steps[:, i]).clamp_max(0)
        assert torch.allclose(walk[:, i].exp(), p.exp(), atol=1e-12)


def test_ratios_beyond_float32_stay_finite():
    draft = torch.tensor([1e-30, 1 - 1e-30]).expand(1, 4, 2)
    target = torch.tensor([1.0, 0.0]).expand(1, 5, 2)
    block = Block.of(torch.zeros(1, 4, dtype=torch.long), draft, target)
    for distribution_of in DISTRIBUTIONS.values():
        assert distribution_of(block).survival.tolist() == [[1.0] * 4]


MILLION = 1_000_000


def sampled(distribution_of, block, generator):
    """Return counts of (accepted, next token) in a million batched samples on one block, and their
    distribution.
    """
    vocab_size = block.target_probs.shape[-1]
    count = block.num_drafted + 1
    distribution = distribution_of(block)
    following = torch.stack([distribution.next_probs(torch.tensor([n]))[0] for n in range(count)])
    expected = (
        distribution.length_probs[0, :, None] * following / following.sum(dim=-1, keepdim=True)
    )
    rows = [
        x.expand(MILLION, *x.shape[1:])
        for x in (block.tokens, block.draft_probs, block.target_probs)
    ]
    num_accepted, next_token = distribution_of(Block.of(*rows)).decide(
        *uniforms((2, MILLION), generator)
    )
    return (
        torch.bincount(num_accepted * vocab_size + next_token, minlength=count * vocab_size),
        expected.flatten(),
    )


@pytest.mark.parametrize("distribution_of", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_a_million_samples_follow_the_distribution(distribution_of):
    """False alarm with probability 1e-6 each; the wrong rule's distribution is distinguishable."""
    block = random_block(1, 3, 4, seed=32, dtype=torch.float64, spread=1.0)
    counts, expected = sampled(distribution_of, block, torch.Generator().manual_seed(5))
    assert chi_square_p_value(counts, expected) > 1e-6
    for other in DISTRIBUTIONS.values():
        if other is not distribution_of:
            assert (
                chi_square_p_value(counts, sampled(other, block, torch.Generator())[1] + 1e-12)
                < 1e-6
            )


@pytest.mark.parametrize("rule", [*RULES[2:], SyntheticVerification(0.6)], **named)
def test_a_million_samples_of_lossy_rules_follow_their_distributions(rule):
    block = random_block(1, 3, 4, seed=11, dtype=torch.float64, spread=1.0)
    counts, expected = sampled(rule.distribution, block, torch.Generator().manual_seed(6))
    assert chi_square_p_value(counts, expected) > 1e-6
