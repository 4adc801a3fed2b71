"""Tokens per round: by formula for independent acceptances, and by enumeration of every draft for models with few tokens."""

import itertools
from functools import cache

import torch
from torch import Tensor

from specheads.decoding.records import Draft
from specheads.decoding.verification.chain_distribution import Block
from specheads.decoding.verification.greedy_block import GreedyBlockVerification, NestedDistribution
from specheads.decoding.verification.tree_distribution import TreeBlock, TreeVerification
from specheads.decoding.verification.verify_step import ChainVerification
from specheads.theory.rejections import Chains


def tokens_per_round(acceptance: float, num_drafted: int) -> float:
    """Return the expected tokens of a round, the target's included, where each drafted token is accepted independently.

    It is `(1 - a^(K+1)) / (1 - a)` (Leviathan et al. 2023, equation 1).
    """
    return sum(acceptance**count for count in range(num_drafted + 1))


def best_length(acceptance: float, ratio: float, longest: int = 100) -> int:
    """Return the number of drafted tokens with the most tokens per second; 0 where drafting does not pay.

    Args:
        acceptance: of each token, independently.
        ratio: the cost of a forward pass of the target in draft steps.
        longest: the most tokens to consider.
    """
    speeds = [tokens_per_round(acceptance, count) / (ratio + count) for count in range(longest + 1)]
    return max(range(longest + 1), key=speeds.__getitem__)


def every_draft(chains: Chains, num_drafted: int) -> tuple[Tensor, Block]:
    """Return the probabilities (V^K,) of all drafts of K tokens at the start of a text, and the drafts as one block."""
    vocab_size = chains.draft.shape[-1]
    tokens = torch.cartesian_prod(*[torch.arange(vocab_size)] * num_drafted).reshape(-1, num_drafted)
    before = torch.nn.functional.pad(tokens, (1, 0))  # a text begins after token 0
    draft, target = (
        torch.stack([each[place][before[:, place]] for place in range(num_drafted + 1)], dim=1)
        for each in (chains.draft, chains.target)
    )
    block = Block.of(tokens, draft, target)
    return block.drafted_probs()[0].prod(dim=1), block


def enumerated_tokens_per_round(rule: ChainVerification | GreedyBlockVerification, chains: Chains, num_drafted: int) -> float:
    """Return the expected tokens of the first round under a verification rule, summed over every draft."""
    probability, block = every_draft(chains, num_drafted)
    if isinstance(rule, GreedyBlockVerification):  # which goes on with what earlier rounds have modified
        start = rule.start_prompt(len(block.tokens), block.tokens.device)
        distribution = NestedDistribution.of(start, block).distribution
    else:
        distribution = rule.distribution(block)
    return 1 + (probability @ distribution.survival.double().sum(dim=1)).item()


def enumerated_tokens_of_samples(rule: TreeVerification, chains: Chains, num_drafted: int, num_drafts: int) -> float:
    """Return the expected tokens of the first round where `num_drafts` independent drafts of K tokens are verified together.

    Only the number of drafts that begin with the accepted tokens matters, so every set of next tokens is enumerated at each last
    token.
    """

    @cache
    def accepted(place: int, last: int, drafts: int) -> float:
        if place == num_drafted:
            return 0.0
        draft, target = (each[place, last] for each in (chains.draft, chains.target))
        total = 0.0
        for sampled in itertools.product(range(len(draft)), repeat=drafts):
            chance = draft[list(sampled)].prod().item()
            tokens = sorted(set(sampled))
            for token, move in zip(tokens, _moves(rule, sampled, draft, target), strict=True):
                total += chance * move * (1 + accepted(place + 1, token, sampled.count(token)))
        return total

    return 1 + accepted(0, 0, num_drafts)


def _moves(rule: TreeVerification, sampled: tuple[int, ...], draft: Tensor, target: Tensor) -> list[float]:
    """Return the probability that each of the sampled tokens, in ascending order, is accepted at a node."""
    tokens = sorted(set(sampled))
    nodes = torch.zeros(len(tokens), dtype=torch.long)
    order = torch.tensor([tokens.index(token) for token in sampled])
    tree = Draft(torch.tensor(tokens), nodes - 1, nodes, draft[None], order, num_draft_calls=1)
    return rule.distribution(TreeBlock.of(tree, target.expand(len(tokens) + 1, -1))).moves.tolist()


def most_tokens_per_round(chains: Chains, num_drafted: int) -> float:
    """Return the most tokens that a lossless rule can emit in a round: the value of an optimal transport.

    Drafts and texts of the target agree on a first i tokens with probability `sum_s min(T(s), D(s))` at most, T and D the
    probabilities of i tokens (Sun et al. 2024, section 4).
    """
    total = 1.0
    for count in range(1, num_drafted + 1):
        _, block = every_draft(chains, count)
        total += torch.minimum(*(each.prod(dim=1) for each in block.drafted_probs())).sum().item()
    return total
