"""Random models on tiny vocabularies, and the exact distribution of what decoding emits with
them.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specheads.decoding.verification import Block, VerificationRule
from specheads.pair.sampling import Warp


class Model:
    """A random distribution of the next token for every prefix.

    `adversarial`: nearly all mass is on few tokens, and some probabilities are exactly zero.
    """

    def __init__(self, vocab_size: int, seed: int, adversarial: bool = False) -> None:
        self.vocab_size = vocab_size
        self.seed = seed
        self.adversarial = adversarial
        self._probs = {}

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        """Return the distribution (V,) in float64 after `prefix`."""
        if prefix not in self._probs:
            number = (
                hash((self.seed, len(prefix), sum(token * 7**i for i, token in enumerate(prefix))))
                % 2**31
            )
            generator = torch.Generator().manual_seed(number)
            probs = torch.rand(self.vocab_size, generator=generator, dtype=torch.float64) ** (
                6 if self.adversarial else 1
            )
            if self.adversarial and number % 3:
                probs[number % self.vocab_size] = 0
            self._probs[prefix] = probs / probs.sum()
        return self._probs[prefix]

    def in_round(self, start: tuple[int, ...]) -> "Model":
        """Return the model as it drafts in a round that begins after `start`."""
        return self

    def joint(self, tokens: tuple[int, ...], prefix: tuple[int, ...] = ()) -> float:
        return math.prod(
            self((*prefix, *tokens[:i]))[token].item() for i, token in enumerate(tokens)
        )


class Warped(Model):
    """A model at a temperature and then under a warp, as decoding reads it.

    Its output has the tokens `kept`, or all.
    """

    def __init__(
        self, model: Model, warp: Warp, kept: Sequence[int] | None = None, temperature: float = 1.0
    ) -> None:
        super().__init__(model.vocab_size, model.seed)
        self.model = model
        self.warp = warp
        self.temperature = temperature
        self.kept = list(range(model.vocab_size)) if kept is None else list(kept)

    def __call__(self, prefix: tuple[int, ...]) -> Tensor:
        logits = torch.full((self.vocab_size,), -torch.inf, dtype=torch.float64)
        logits[self.kept] = self.model(prefix)[self.kept].log() / self.temperature
        return self.warp(logits)


def block_after(
    target: Model, draft: Model, prefix: tuple[int, ...], num_drafted: int
) -> tuple[Block, Tensor]:
    """Return every drafted block after `prefix` as one batch, and the probability of each (B,)."""
    blocks = list(itertools.product(range(target.vocab_size), repeat=num_drafted))
    draft = draft.in_round(prefix)
    distributions = [
        torch.stack(
            [torch.stack([model((*prefix, *block[:i])) for i in range(count)]) for block in blocks]
        )
        for model, count in ((draft, num_drafted), (target, num_drafted + 1))
    ]
    weights = torch.tensor([draft.joint(block, prefix) for block in blocks], dtype=torch.float64)
    return (
        Block.of(
            torch.tensor(blocks, dtype=torch.long).reshape(len(blocks), num_drafted), *distributions
        ),
        weights,
    )


def emitted_distribution(
    rule: VerificationRule,
    target: Model,
    draft: Model,
    num_drafted: int,
    num_tokens: int,
    lengths: Callable[[tuple[int, ...], tuple[int, ...]], int] | None = None,
) -> Tensor:
    """Return the exact distribution of the first `num_tokens` emitted tokens, (V, ..., V).

    Args:
        lengths: (prefix, drafted tokens) -> how many of them a stopping rule lets be drafted;
            default all.
    """
    total = torch.zeros((target.vocab_size,) * num_tokens, dtype=torch.float64)
    # By number of tokens: prefix -> probability.
    states = [defaultdict(float) for _ in range(num_tokens)]
    states[0][()] = 1.0
    for made in range(num_tokens):
        for prefix, prob in states[made].items():
            block, weights = block_after(target, draft, prefix, num_drafted)
            count = len(weights)
            if lengths is not None:
                block = replace(
                    block,
                    lengths=torch.tensor(
                        [lengths(prefix, tuple(row)) for row in block.tokens.tolist()]
                    ),
                )
            distribution = rule.distribution(block)
            ends = distribution.length_probs
            for accepted in range(num_drafted + 1):
                following = distribution.next_probs(torch.full((count,), accepted))
                following = following / following.sum(dim=-1, keepdim=True)
                joint_probs = prob * weights[:, None] * ends[:, accepted, None] * following
                for token in range(target.vocab_size):
                    for row in (joint_probs[:, token] > 0).nonzero().flatten().tolist():
                        emitted = (*prefix, *block.tokens[row, :accepted].tolist(), token)[
                            :num_tokens
                        ]
                        if len(emitted) == num_tokens:
                            total[emitted] += joint_probs[row, token].item()
                        else:
                            states[len(emitted)][emitted] += joint_probs[row, token].item()
    return total


def difference(emitted: Tensor, target: Model) -> float:
    """Return the largest difference between a distribution of emitted tokens (V, ..., V) and the
    target's.
    """
    sequences = itertools.product(range(target.vocab_size), repeat=emitted.dim())
    return max(abs(emitted[tokens].item() - target.joint(tokens)) for tokens in sequences)


def expected_accepted(
    distribution_of: Callable, target: Model, draft: Model, num_drafted: int
) -> float:
    """Return the mean number of accepted tokens of a block drafted from the start."""
    block, weights = block_after(target, draft, (), num_drafted)
    return (weights * distribution_of(block).survival.sum(dim=1)).sum().item()
