"""Tokens per round, by formula for independent acceptances and by enumeration of every draft for models with few tokens.

The same enumeration gives the distribution of what a decoder emits: whether a verification rule is unbiased.
"""

import itertools
from functools import cache

import torch
from torch import Tensor

from specheads.decoding.records import Draft
from specheads.decoding.verification.chain_distribution import Block
from specheads.decoding.verification.verify_step import ChainVerification
from specheads.papers.block.greedy_block import GreedyBlockVerification, NestedDistribution
from specheads.papers.theory.rejections import Chains, rejected, residual, total_variation
from specheads.papers.trees.distribution import TreeBlock
from specheads.papers.trees.verifier import TreeVerification


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


def bias_of_first_two(rule: ChainVerification, chains: Chains) -> float:
    """Return the total variation between the first two tokens of a text under a rule, with two drafted, and the target's."""
    vocab_size = chains.target.shape[-1]
    probability, block = every_draft(chains, 2)
    distribution = rule.distribution(block)
    chances = probability[:, None] * distribution.length_probs.double()
    first, second = block.tokens.T
    emitted = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    emitted.index_put_((first, second), chances[:, 2], accumulate=True)
    after = [_normalised(distribution.next_probs(torch.full_like(first, count))) for count in (0, 1)]
    emitted.index_add_(0, first, chances[:, 1, None] * after[1])
    emitted += (chances[:, 0, None] * after[0]).sum(dim=0)[:, None] * chains.target[1]
    expected = chains.target[0, 0][:, None] * chains.target[1]
    return total_variation(expected.flatten(), emitted.flatten()).item()


def _normalised(weights: Tensor) -> Tensor:
    return weights.double() / weights.double().sum(dim=-1, keepdim=True).clamp_min(1e-300)


def bias_of_batch(target: Tensor, draft: Tensor, num_drafts: int) -> float:
    """Return the total variation between the target and the token that `num_drafts` sampled tokens, tested in turn, lead to."""
    left, reach, emitted = target, 1.0, torch.zeros_like(target)
    for _ in range(num_drafts):
        accepted = torch.minimum(left, draft)
        emitted = emitted + reach * accepted
        reach *= 1 - accepted.sum().item()
        left = residual(left, draft)
    return total_variation(target, emitted + rejected(target, draft, num_drafts)).item()


def most_likely_blocks(chains: Chains, num_tokens: int, block: int) -> float:
    """Return the log-likelihood in nats of `num_tokens` that are chosen `block` at a time, each block the most likely of all.

    Source: multi-token joint greedy decoding (Qin et al. 2024, section 3), by enumeration.
    """
    vocab_size, last, total = chains.target.shape[-1], 0, 0.0
    for start in range(0, num_tokens, block):
        length = min(block, num_tokens - start)
        values = []
        for tokens in itertools.product(range(vocab_size), repeat=length):
            before = (last, *tokens[:-1])
            nats = sum(
                chains.target[start + place, a, b].log().item() for place, (a, b) in enumerate(zip(before, tokens, strict=True))
            )
            values.append((nats, tokens))
        nats, tokens = max(values)
        total, last = total + nats, tokens[-1]
    return total
