"""Rejections of speculative decoding, expected and simulated.

A response has N tokens. Drafting goes on until a token is rejected, and every rejection costs a forward pass of the target. With
M drafts in a batch, M tokens are sampled after each rejection and tested one after the other, and the draft of the accepted one
goes on alone. Models are Markov chains that change with the position, so that expectations are sums over V states instead of V^N
texts.

Source: Yin et al. 2024, "A Theoretical Perspective for Speculative Decoding Algorithm".
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.pair.sampling import accept_prob, sample


@dataclass(frozen=True)
class Chains:
    """A target and a draft of N positions and V tokens, (N, V, V) float64 each: the next token's distribution by the last token.

    A text begins after token 0.
    """

    target: Tensor
    draft: Tensor

    @classmethod
    def random(cls, num_positions: int, vocab_size: int, generator: torch.Generator, sharpness: float = 1.0) -> "Chains":
        """Return chains whose logits are independent normal numbers with this standard deviation."""
        shape = (2, num_positions, vocab_size, vocab_size)
        logits = sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
        return cls(*logits.softmax(dim=-1))


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return `norm((t - d)+)` (..., V) of distributions (..., V); where they are equal, the target."""
    positive = (target - draft).clamp_min(0)
    mass = positive.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, positive / mass.clamp_min(1e-300), target)


def total_variation(target: Tensor, draft: Tensor) -> Tensor:
    """Return the total variation (...) of distributions (..., V)."""
    return (target - draft).clamp_min(0).sum(dim=-1)


def rejected(target: Tensor, draft: Tensor, num_drafts: int = 1) -> Tensor:
    """Return the probability (..., V) that all of `num_drafts` sampled tokens are rejected, and another token is emitted.

    Token m is tested against the residual t_m of those before it, t_1 = t; so all are rejected with probability
    `prod_m TV(t_m, d)`, and the emitted token is sampled from t_{M+1} (SpecInfer, Miao et al. 2024).
    """
    left, chance = target, torch.ones(target.shape[:-1], dtype=target.dtype)
    for _ in range(num_drafts):
        chance = chance * total_variation(left, draft)
        left = residual(left, draft)
    return chance[..., None] * left


def expected_rejections(chains: Chains, num_drafts: int = 1) -> float:
    """Return the expected number of rejections in N tokens.

    For one draft it is `sum_n E[TV(t, d)]` under the target (theorem 1). For more, a recursion over the last token and whether
    it replaced rejected ones: only then is a batch drafted.
    """
    vocab_size = chains.target.shape[-1]
    fresh = torch.zeros(vocab_size, dtype=torch.float64)  # probability of each last token that a batch follows
    fresh[0] = 1.0
    going_on, total = torch.zeros_like(fresh), 0.0
    of_batch, alone = rejected(chains.target, chains.draft, num_drafts), rejected(chains.target, chains.draft)
    for target, in_batch, by_itself in zip(chains.target, of_batch, alone, strict=True):
        replaced = fresh @ in_batch + going_on @ by_itself
        total += replaced.sum().item()
        emitted = (fresh + going_on) @ target
        fresh, going_on = replaced, emitted - replaced
    return total


def limit_of_rejections(chains: Chains, precision: float = 1e-9) -> float:
    """Return what the expected number of rejections falls to as the batch grows: drafts go on alone after the first token."""
    num_drafts, before = 1, expected_rejections(chains)
    while (now := expected_rejections(chains, 2 * num_drafts)) < before - precision:
        num_drafts, before = 2 * num_drafts, now
    return now


def simulated_rejections(chains: Chains, num_drafts: int, num_texts: int, generator: torch.Generator) -> Tensor:
    """Return the number of rejections (num_texts,) in texts that are decoded with a batch of drafts after each rejection."""

    def uniforms() -> Tensor:
        return torch.rand(num_texts, generator=generator, dtype=torch.float64)

    last = torch.zeros(num_texts, dtype=torch.long)
    fresh, counts = torch.ones(num_texts, dtype=torch.bool), torch.zeros(num_texts, dtype=torch.long)
    for target, draft in zip(chains.target, chains.draft, strict=True):
        of_draft, left = draft[last], target[last]
        token, undecided = torch.full((num_texts,), -1), torch.ones(num_texts, dtype=torch.bool)
        for number in range(num_drafts):
            tested = undecided & (fresh | (number == 0))
            sampled = sample(of_draft, uniforms())
            chance = accept_prob(*(each.gather(1, sampled[:, None]).squeeze(1) for each in (left, of_draft)))
            passes = tested & (uniforms() < chance)
            token = torch.where(passes, sampled, token)
            left = torch.where((tested & ~passes)[:, None], residual(left, of_draft), left)
            undecided &= ~passes
        token = torch.where(undecided, sample(left, uniforms()), token)
        counts += undecided
        fresh, last = undecided, token
    return counts


@dataclass(frozen=True)
class _BiasedStep:
    """One step of biased verification: how often a token is rejected, and how far the output is from the target."""

    rejection: float
    bias_opt: float  # total variation, with the residual that biases least
    bias_uno: float  # after a rejection the target's own distribution is sampled


def least_bias(target: Tensor, draft: Tensor, acceptance: Tensor) -> Tensor:
    """Return the least total variation (...) of a rule that accepts token x with probability `acceptance` (..., V).

    It is `1/2 sum |t - b d| - 1/2 sum (1 - b) d` (theorem 4).
    """
    accepted = acceptance * draft
    return 0.5 * (target - accepted).abs().sum(dim=-1) - 0.5 * (draft - accepted).sum(dim=-1)


def biased_step(target: Tensor, draft: Tensor, eps: float) -> _BiasedStep:
    """Return what accepting with `b = min(1, (t + eps) / d)` does for distributions (V,).

    With the best residual `P(reject) + TV = TV(t, d)`: a straight line, on which no acceptance can improve (section 4).
    """
    accepted = (accept_prob(target + eps, draft)) * draft
    rejection = max(0.0, 1 - accepted.sum().item())  # rounding may leave less
    output = [accepted + rejection * each for each in (residual(target, accepted), target)]
    bias_opt, bias_uno = (0.5 * (each - target).abs().sum().item() for each in output)
    return _BiasedStep(rejection, bias_opt, bias_uno)


def fewest_rejections(chains: Chains) -> float:
    """Return the least expected number of rejections of all rules that test tokens one by one and keep the target's distribution.

    Such a rule accepts a drafted token x with some probability b(x). It can keep the distribution if `b d <= t`, and rejects
    `1 - sum b d`, which is linear in b; so the least is at a corner of that box, and all corners are enumerated at every place.

    Source: theorem 2.
    """
    vocab_size = chains.target.shape[-1]
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * vocab_size).reshape(-1, vocab_size)
    last, total = torch.zeros(vocab_size, dtype=torch.float64), 0.0
    last[0] = 1.0
    for target, draft in zip(chains.target, chains.draft, strict=True):
        accepted = (corners[:, None] * accept_prob(target, draft) * draft).sum(dim=-1)  # (corners, V), by the last token
        total += (last * (1 - accepted).amin(dim=0)).sum().item()
        last = last @ target
    return total
