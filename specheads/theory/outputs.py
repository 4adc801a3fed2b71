"""The distribution of what a decoder emits, enumerated: whether a verification rule is unbiased."""

import itertools

import torch
from torch import Tensor

from specheads.decoding.verification.verify_step import ChainVerification
from specheads.theory.rejections import Chains, rejected, residual, total_variation
from specheads.theory.rounds import every_draft


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
