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

from specheads.sampling import accept_prob


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
    for target, draft in zip(chains.target, chains.draft, strict=True):
        replaced = fresh @ rejected(target, draft, num_drafts) + going_on @ rejected(target, draft)
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
    last = torch.zeros(num_texts, dtype=torch.long)
    fresh, counts = torch.ones(num_texts, dtype=torch.bool), torch.zeros(num_texts, dtype=torch.long)
    for target, draft in zip(chains.target, chains.draft, strict=True):
        of_draft, left = draft[last], target[last]
        token, undecided = torch.full((num_texts,), -1), torch.ones(num_texts, dtype=torch.bool)
        for number in range(num_drafts):
            tested = undecided & (fresh | (number == 0))
            sampled = torch.multinomial(of_draft, 1, generator=generator).squeeze(1)
            chance = accept_prob(*(each.gather(1, sampled[:, None]).squeeze(1) for each in (left, of_draft)))
            passes = tested & (torch.rand(num_texts, generator=generator, dtype=torch.float64) < chance)
            token = torch.where(passes, sampled, token)
            left = torch.where((tested & ~passes)[:, None], residual(left, of_draft), left)
            undecided &= ~passes
        token = torch.where(undecided, torch.multinomial(left, 1, generator=generator).squeeze(1), token)
        counts += undecided
        fresh, last = undecided, token
    return counts


@dataclass(frozen=True)
class BiasedStep:
    """One step of biased verification: how often a token is rejected, and how far the output is from the target."""

    rejection: float
    bias_opt: float  # total variation, with the residual that biases least
    bias_uno: float  # after a rejection the target's own distribution is sampled


def biased_step(target: Tensor, draft: Tensor, eps: float) -> BiasedStep:
    """Return what accepting with `b = min(1, (t + eps) / d)` does for distributions (V,).

    With the best residual `P(reject) + TV = TV(t, d)`: a straight line, on which no acceptance can improve (section 4).
    """
    accepted = (accept_prob(target + eps, draft)) * draft
    rejection = 1 - accepted.sum().item()
    output = [accepted + rejection * each for each in (residual(target, accepted), target)]
    bias_opt, bias_uno = (0.5 * (each - target).abs().sum().item() for each in output)
    return BiasedStep(rejection, bias_opt, bias_uno)
