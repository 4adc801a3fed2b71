"""Random models on tiny vocabularies, and the exact distribution of what decoding emits with them."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specheads.decoding.verification import Block, ChainVerification
from specheads.decoding.verification.chains import prefix_distribution
from specheads.decoding.verification.rule import AcceptanceDistribution
from specheads.pair.sampling import uniforms
from specheads.papers.block import GreedyBlockVerification, Levels, NestedDistribution


class Model:
    """A random distribution of the next token for every prefix.

    `adversarial`: nearly all mass is on few tokens, and some probabilities are exactly zero.
    """

    def __init__(self, vocab_size: int, seed: int, adversarial: bool = False) -> None:
        self.vocab_size, self.seed, self.adversarial = vocab_size, seed, adversarial
        self._probs = {}

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        """Return the distribution (V,) in float64 after `prefix`."""
        if prefix not in self._probs:
            number = hash((self.seed, len(prefix), sum(token * 7**i for i, token in enumerate(prefix)))) % 2**31
            generator = torch.Generator().manual_seed(number)
            probs = torch.rand(self.vocab_size, generator=generator, dtype=torch.float64) ** (6 if self.adversarial else 1)
            if self.adversarial and number % 3:
                probs[number % self.vocab_size] = 0
            self._probs[prefix] = probs / probs.sum()
        return self._probs[prefix]

    def joint(self, tokens: tuple[int, ...], prefix: tuple[int, ...] = ()) -> float:
        return math.prod(self((*prefix, *tokens[:i]))[token].item() for i, token in enumerate(tokens))


def block_after(target: Model, draft: Model, prefix: tuple[int, ...], num_drafted: int) -> tuple[Block, Tensor]:
    """Return every drafted block after `prefix` as one batch, and the probability of each (B,).

    The draft's distributions include the one after the block.
    """
    blocks = list(itertools.product(range(target.vocab_size), repeat=num_drafted))
    distributions = [
        torch.stack([torch.stack([model((*prefix, *block[:i])) for i in range(num_drafted + 1)]) for block in blocks])
        for model in (draft, target)
    ]
    weights = torch.tensor([draft.joint(block, prefix) for block in blocks], dtype=torch.float64)
    return Block.of(torch.tensor(blocks, dtype=torch.long).reshape(len(blocks), num_drafted), *distributions), weights


def emitted_distribution(
    rule: ChainVerification | int,
    target: Model,
    draft: Model,
    num_drafted: int,
    num_tokens: int,
    lengths: Callable[[tuple[int, ...], tuple[int, ...]], int] | None = None,
    planned: bool = True,
) -> Tensor:
    """Return the exact distribution of the first `num_tokens` emitted tokens, (V, ..., V).

    Args:
        rule: a rule that verifies blocks by `rule.distribution`; or for greedy block verification the number of levels it may
            keep.
        lengths: (prefix, drafted tokens) -> how many of them a stopping rule lets be drafted; default all.
        planned: whether verification knows that lengths do not depend on the drafted tokens.
    """
    total = torch.zeros((target.vocab_size,) * num_tokens, dtype=torch.float64)
    num_levels = rule if isinstance(rule, int) else 0
    fresh = ((0.0,) * num_levels, (0,) * num_levels)
    states = [defaultdict(float) for _ in range(num_tokens)]  # by number of tokens: (prefix, levels) -> probability
    states[0][(), fresh] = 1.0
    for made in range(num_tokens):
        for (prefix, (log_ratio, left)), prob in states[made].items():
            block, weights = block_after(target, draft, prefix, num_drafted)
            count = len(weights)
            if lengths is not None:
                drafted_lengths = torch.tensor([lengths(prefix, tuple(row)) for row in block.tokens.tolist()])
                block = replace(
                    block, lengths=drafted_lengths, planned=drafted_lengths if planned else torch.zeros_like(drafted_lengths)
                )
            if isinstance(rule, int):
                levels = Levels(torch.tensor([log_ratio] * count, dtype=torch.float64), torch.tensor([left] * count))
                nested = NestedDistribution.of(levels, block)
                distribution = nested.distribution
            else:
                distribution = rule.distribution(replace(block, draft_probs=block.draft_probs[:, :num_drafted]))
            ends = distribution.length_probs
            for accepted in range(num_drafted + 1):
                n = torch.full((count,), accepted)
                following = distribution.next_probs(n)
                following = following / following.sum(dim=-1, keepdim=True)
                joint_probs = prob * weights[:, None] * ends[:, accepted, None] * following
                for token in range(target.vocab_size):
                    if isinstance(rule, int):
                        after = nested.after(n, torch.full((count,), token))
                    for row in (joint_probs[:, token] > 0).nonzero().flatten().tolist():
                        emitted = (*prefix, *block.tokens[row, :accepted].tolist(), token)[:num_tokens]
                        joint_prob = joint_probs[row, token].item()
                        if len(emitted) == num_tokens:
                            total[emitted] += joint_prob
                        elif isinstance(rule, int):
                            key = (tuple(round(x, 10) for x in after.log_ratio[row].tolist()), tuple(after.left[row].tolist()))
                            states[len(emitted)][emitted, key] += joint_prob
                        else:
                            states[len(emitted)][emitted, fresh] += joint_prob
    return total


def greedy_block_distribution(block: Block) -> AcceptanceDistribution:
    """Return the acceptance distribution of greedy block verification of one block that nothing modifies."""
    return prefix_distribution(block, block.log_ratios().cumsum(dim=1))


def difference(emitted: Tensor, target: Model) -> float:
    """Return the largest difference between a distribution of emitted tokens (V, ..., V) and the target's."""
    sequences = itertools.product(range(target.vocab_size), repeat=emitted.dim())
    return max(abs(emitted[tokens].item() - target.joint(tokens)) for tokens in sequences)


def expected_accepted(distribution_of: Callable, target: Model, draft: Model, num_drafted: int) -> float:
    """Return the mean number of accepted tokens of a block drafted from the start."""
    block, weights = block_after(target, draft, (), num_drafted)
    return (
        (weights * distribution_of(replace(block, draft_probs=block.draft_probs[:, :num_drafted])).survival.sum(dim=1))
        .sum()
        .item()
    )


def greedy_block_verification(draft_tokens, draft_probs, target_probs, generator, lengths=None, planned=None):
    """Verify blocks that no earlier round has modified, at random numbers; return the verdict and the levels."""
    block = Block.of(draft_tokens, draft_probs, target_probs, lengths, planned)
    if draft_probs.shape[1] == draft_tokens.shape[1]:
        after = torch.zeros_like(block.target_probs[:, :1])  # no modification reads it
        block = replace(block, draft_probs=torch.cat([block.draft_probs, after], dim=1))
    levels = Levels.none(*draft_tokens.shape, draft_tokens.device)
    return GreedyBlockVerification()(levels, block, *uniforms((2, len(draft_tokens)), generator))
