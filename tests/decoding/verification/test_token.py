import itertools

import pytest
import torch
from statistics_helper import chi_square_p_value

from specheads.decoding.verification import token_law, token_verification


def random_laws(vocab_size, length, seed, zeros=False):
    """Conditional laws (prefix -> probabilities) of a random target and draft, for prefixes up to `length` tokens."""
    generator = torch.Generator().manual_seed(seed)

    def law():
        probs = torch.rand(vocab_size, generator=generator, dtype=torch.float64) ** 2
        if zeros:
            probs[torch.randint(vocab_size, (1,), generator=generator)] = 0
        return probs / probs.sum()

    prefixes = [p for n in range(length + 1) for p in itertools.product(range(vocab_size), repeat=n)]
    return {p: law() for p in prefixes}, {p: law() for p in prefixes}


def joint(laws, tokens):
    prob = 1.0
    for i, token in enumerate(tokens):
        prob = prob * laws[tuple(tokens[:i])][token]
    return prob


def emitted_law(target, draft, vocab_size, num_drafted):
    """The law of the first K + 1 tokens: one verified block, and the target's own tokens after what it emitted."""
    total = torch.zeros((vocab_size,) * (num_drafted + 1), dtype=torch.float64)
    expected_accepted = 0.0
    for block in itertools.product(range(vocab_size), repeat=num_drafted):
        weight = joint(draft, block)
        if weight == 0:
            continue
        draft_probs = torch.stack([draft[block[:i]] for i in range(num_drafted)])
        target_probs = torch.stack([target[block[:i]] for i in range(num_drafted + 1)])
        law = token_law(torch.tensor([block]), draft_probs[None], target_probs[None])
        alive = weight
        for n in range(num_drafted + 1):
            stops = alive * (1 - law.pass_probs[0, n] if n < num_drafted else 1.0)
            expected_accepted += n * stops
            following = law.next_probs[0, n] / law.next_probs[0, n].sum()
            for rest in itertools.product(range(vocab_size), repeat=num_drafted + 1 - n):
                after = following[rest[0]]
                for i in range(1, len(rest)):
                    after = after * target[(*block[:n], *rest[:i])][rest[i]]
                total[(*block[:n], *rest)] += stops * after
            alive = alive * law.pass_probs[0, n] if n < num_drafted else alive
    return total, expected_accepted


@pytest.mark.parametrize("vocab_size, num_drafted", [(2, 1), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_emitted_tokens_follow_the_target(vocab_size, num_drafted, zeros):
    for seed in range(3):
        target, draft = random_laws(vocab_size, num_drafted + 1, seed, zeros)
        found, _ = emitted_law(target, draft, vocab_size, num_drafted)
        for tokens in itertools.product(range(vocab_size), repeat=num_drafted + 1):
            assert found[tokens].item() == pytest.approx(float(joint(target, tokens)), abs=1e-12)


def test_the_worked_example_accepts_ten_ninths():
    prefixes = [p for n in range(4) for p in itertools.product(range(2), repeat=n)]
    target = {p: torch.tensor([1 / 3, 2 / 3], dtype=torch.float64) for p in prefixes}
    draft = {p: torch.tensor([2 / 3, 1 / 3], dtype=torch.float64) for p in prefixes}
    assert emitted_law(target, draft, 2, 2)[1].item() == pytest.approx(10 / 9, abs=1e-12)


def test_point_masses_compare_prefixes():
    target = torch.eye(4)[torch.tensor([[1, 2, 3, 0]])]
    draft = torch.eye(4)[torch.tensor([[1, 2, 0]])]
    verdict = token_verification(torch.tensor([[1, 2, 0]]), draft, target, torch.Generator().manual_seed(0))
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == (2, 3)


def test_an_empty_draft_gives_the_targets_token():
    verdict = token_verification(
        torch.empty(1, 0, dtype=torch.long),
        torch.empty(1, 0, 4),
        torch.eye(4)[torch.tensor([[2]])],
        torch.Generator().manual_seed(0),
    )
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == (0, 2)


def test_equal_laws_accept_everything():
    probs = torch.rand(64, 5, 11, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = torch.randint(11, (64, 4), generator=torch.Generator().manual_seed(1))
    verdict = token_verification(tokens, probs[:, :4], probs, torch.Generator().manual_seed(2))
    assert verdict.num_accepted.tolist() == [4] * 64


def test_a_residual_emptied_by_rounding_falls_back_to_the_target():
    target = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    draft = target[:, :1].clone()
    draft[0, 0, 0] += 1e-7
    law = token_law(torch.tensor([[0]]), draft, target)
    assert law.pass_probs.item() < 1
    assert law.next_probs[0, 0].tolist() == target[0, 0].tolist()


def test_ragged_lengths_act_as_shorter_blocks():
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(3, 5, 7, generator=generator).softmax(-1)
    draft = torch.rand(3, 4, 7, generator=generator).softmax(-1)
    tokens = torch.randint(7, (3, 4), generator=generator)
    lengths = torch.tensor([0, 2, 4])
    law = token_law(tokens, draft, target, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = token_law(tokens[row : row + 1, :length], draft[row : row + 1, :length], target[row : row + 1, : length + 1])
        assert law.pass_probs[row, length:].sum() == 0
        torch.testing.assert_close(law.pass_probs[row, :length], alone.pass_probs[0])
        torch.testing.assert_close(law.next_probs[row, : length + 1], alone.next_probs[0])


def test_the_sampling_function_agrees_with_its_law():
    target, draft = random_laws(3, 3, seed=5)
    block = torch.tensor([[0, 2]])
    draft_probs = torch.stack([draft[()], draft[(0,)]])[None]
    target_probs = torch.stack([target[()], target[(0,)], target[(0, 2)]])[None]
    law = token_law(block, draft_probs, target_probs)
    rows = 300_000
    repeated = [x.expand(rows, *x.shape[1:]) for x in (block, draft_probs, target_probs)]
    verdict = token_verification(*repeated, torch.Generator().manual_seed(7))
    first, second = law.pass_probs[0]
    reached = torch.stack([1 - first, first * (1 - second), first * second])
    expected = reached[:, None] * law.next_probs[0] / law.next_probs[0].sum(-1, keepdim=True)
    counts = torch.bincount(verdict.num_accepted * 3 + verdict.next_token, minlength=9)
    # false alarm with probability 1e-6
    assert chi_square_p_value(counts, expected.flatten()) > 1e-6
