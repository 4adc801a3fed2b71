"""Markov chains in place of models, with so few tokens that every draft of a round can be
enumerated.

The enumeration is of the rules that decode: how many tokens a round emits, and whether they have
the target's distribution.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.verification import Block, VerificationRule


@dataclass(frozen=True)
class Chains:
    """A target and a draft of N positions and V tokens, (N, V, V) float64 each: the next token's
    distribution by the last token.

    They change with the position, so expectations are sums over V states instead of V^N texts. A
    text begins after token 0.
    """

    target: Tensor
    draft: Tensor

    @classmethod
    def random(
        cls, num_positions: int, vocab_size: int, generator: torch.Generator, sharpness: float = 1.0
    ) -> "Chains":
        """Return chains whose logits are independent normal numbers with this standard
        deviation.
        """
        shape = (2, num_positions, vocab_size, vocab_size)
        logits = sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
        return cls(*logits.softmax(dim=-1))

    @classmethod
    def constant(cls, target: Tensor, draft: Tensor, num_positions: int) -> "Chains":
        """Return chains that have two distributions (V,) everywhere."""
        return cls(*(each.expand(num_positions, len(each), -1) for each in (target, draft)))


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return `norm((t - d)+)` (..., V) of distributions (..., V).

    Where they are equal, the target.
    """
    positive = (target - draft).clamp_min(0)
    mass = positive.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, positive / mass.clamp_min(1e-300), target)


def total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """Return the total variation (...) of distributions (..., V)."""
    return (target - draft).clamp_min(0).sum(dim=-1)


def every_draft(chains: Chains, num_drafted: int) -> tuple[Tensor, Block]:
    """Return the probabilities (V^K,) of all drafts of K tokens at the start of a text, and the
    drafts, ordered, as one block.
    """
    vocab_size = chains.draft.shape[-1]
    tokens = torch.cartesian_prod(*[torch.arange(vocab_size)] * num_drafted).reshape(
        -1, num_drafted
    )
    before = torch.nn.functional.pad(tokens, (1, 0))  # a text begins after token 0
    draft, target = (
        torch.stack([each[place][before[:, place]] for place in range(num_drafted + 1)], dim=1)
        for each in (chains.draft, chains.target)
    )
    block = Block.of(tokens, draft[:, :-1], target)
    return block.drafted_probs()[0].prod(dim=1), block


def tokens_per_round(rule: VerificationRule, chains: Chains, num_drafted: int) -> float:
    """Return the expected tokens of the first round under a verification rule, summed over every
    draft.
    """
    probability, block = every_draft(chains, num_drafted)
    return 1 + (probability @ rule.distribution(block).survival.double().sum(dim=1)).item()


def emitted(rule: VerificationRule, chains: Chains, num_drafted: int) -> Tensor:
    """Return the distribution (V^K,), in the order of texts, of a text's first K tokens under a
    rule, with K tokens drafted.

    What follows the first round is the target's.
    """
    probability, block = every_draft(chains, num_drafted)
    distribution = rule.distribution(block)
    vocab_size = chains.target.shape[-1]
    chances = probability[:, None] * distribution.length_probs.double()
    total = torch.zeros_like(probability)
    for count in range(num_drafted):  # accepted tokens
        weights = distribution.next_probs(torch.full_like(block.lengths, count)).double()
        following = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-300)
        # Drafts that begin with the same accepted tokens are next to each other.
        texts = (
            (chances[:, count, None] * following).view(vocab_size**count, -1, vocab_size).sum(dim=1)
        )
        for place in range(count + 1, num_drafted):
            texts = texts.reshape(-1, vocab_size, 1) * chains.target[place]
        total += texts.flatten()
    return total + chances[:, num_drafted]


def bias(rule: VerificationRule, chains: Chains, num_drafted: int) -> float:
    """Return the total variation between the first K tokens of a text under a rule, with K drafted,
    and the target's.
    """
    target = every_draft(Chains(chains.draft, chains.target), num_drafted)[0]
    return total_variation(target, emitted(rule, chains, num_drafted)).item()
