"""Rejections: expected and simulated ones, batches of drafts, the least that is possible, and what
biased rules trade.

A response has N tokens. Drafting goes on until a token is rejected, and every rejection costs a
forward pass of the target. With M drafts in a batch, M tokens are sampled after each rejection and
tested one after the other, and the draft of the accepted one goes on alone.

Source: Yin et al. 2024, "A Theoretical Perspective for Speculative Decoding Algorithm".
"""

import itertools
from math import inf, isinf

import torch
from torch import Generator, Tensor

from benchmarks.papers.chains import Chains, bias, residual, tokens_per_round, total_variation
from benchmarks.papers.measures import Answer, equal
from specheads.decoding.verification import BlockVerification, TokenVerification
from specheads.pair.sampling import accept_prob, sample
from specheads.papers import BiasedVerification

VOCABULARY = 7  # the tokens of the paper's simulations
NUM_TEXTS = 20_000
NUM_MODELS = 20
MOST_ERRORS = 4.9  # standard errors that a right formula exceeds in one of a million simulations
EXACT = 1e-9


def after_batch(target: Tensor, draft: Tensor, num_drafts: float = 1) -> tuple[Tensor, Tensor]:
    """Return the probabilities (..., V) that a token is accepted, and that it is emitted after all
    sampled ones were rejected.

    Token m is tested against the residual t_m of those before it, t_1 = t; so all are rejected with
    probability `prod_m TV(t_m, d)`, and the emitted token is sampled from t_{M+1} (SpecInfer, Miao
    et al. 2024). Of an infinite number of sampled tokens all are rejected only in favour of one
    that the draft never proposes.
    """
    if isinf(num_drafts):
        replaced = torch.where(draft > 0, 0.0, target)
        return target - replaced, replaced
    left = target
    chance = torch.ones(target.shape[:-1], dtype=target.dtype)
    accepted = torch.zeros_like(target)
    for _ in range(int(num_drafts)):
        accepted = accepted + chance[..., None] * torch.minimum(left, draft)
        chance = chance * total_variation(left, draft)
        left = residual(left, draft)
    return accepted, chance[..., None] * left


def expected_rejections(chains: Chains, num_drafts: float = 1) -> float:
    """Return the expected number of rejections in N tokens.

    For one draft it is `sum_n E[TV(t, d)]` under the target (theorem 1). For more, up to infinitely
    many, a recursion over the last token and whether it replaced rejected ones: only then is a
    batch drafted (theorem 3).
    """
    _, of_batch = after_batch(chains.target, chains.draft, num_drafts)
    _, alone = after_batch(chains.target, chains.draft)
    # The probability of each last token that a batch follows, and that a single draft follows.
    fresh = torch.zeros(chains.target.shape[-1], dtype=torch.float64)
    fresh[0] = 1.0
    continued = torch.zeros_like(fresh)
    total = 0.0
    for target, in_batch, by_itself in zip(chains.target, of_batch, alone, strict=True):
        replaced = fresh @ in_batch + continued @ by_itself
        total += replaced.sum().item()
        continued = (fresh + continued) @ target - replaced
        fresh = replaced
    return total


def fewest_rejections(chains: Chains) -> float:
    """Return the least expected number of rejections of all rules that test tokens one by one and
    keep the target's distribution.

    Such a rule accepts a drafted token x with some probability b(x). It can keep the distribution
    only if `b d <= t`, so it accepts no more than `sum min(t, d)` anywhere (theorem 2).
    """
    last = torch.zeros(chains.target.shape[-1], dtype=torch.float64)
    last[0] = 1.0
    total = 0.0
    for target, draft in zip(chains.target, chains.draft, strict=True):
        total += (last * (1 - torch.minimum(target, draft).sum(dim=-1))).sum().item()
        last = last @ target
    return total


def simulated_rejections(
    chains: Chains, num_drafts: int, num_texts: int, generator: Generator
) -> Tensor:
    """Return the number of rejections (num_texts,) in texts that are decoded with a batch of drafts
    after each rejection.
    """

    def uniforms() -> Tensor:
        return torch.rand(num_texts, generator=generator, dtype=torch.float64)

    last = torch.zeros(num_texts, dtype=torch.long)
    fresh = torch.ones(num_texts, dtype=torch.bool)
    counts = torch.zeros(num_texts, dtype=torch.long)
    for target, draft in zip(chains.target, chains.draft, strict=True):
        of_draft = draft[last]
        left = target[last]
        token = torch.full((num_texts,), -1)
        undecided = torch.ones(num_texts, dtype=torch.bool)
        for number in range(num_drafts):
            tested = undecided & (fresh | (number == 0))
            sampled = sample(of_draft, uniforms())
            target_prob = left.gather(1, sampled[:, None]).squeeze(1)
            draft_prob = of_draft.gather(1, sampled[:, None]).squeeze(1)
            passes = tested & (uniforms() < accept_prob(target_prob, draft_prob))
            token = torch.where(passes, sampled, token)
            left = torch.where((tested & ~passes)[:, None], residual(left, of_draft), left)
            undecided &= ~passes
        token = torch.where(undecided, sample(left, uniforms()), token)
        counts += undecided
        fresh = undecided
        last = token
    return counts


def least_bias(target: Tensor, draft: Tensor, acceptance: Tensor) -> Tensor:
    """Return the least total variation (...) of a rule that accepts token x with probability
    `acceptance` (..., V).

    It is `1/2 sum |t - b d| - 1/2 sum (1 - b) d` (theorem 4).
    """
    accepted = acceptance * draft
    return 0.5 * (target - accepted).abs().sum(dim=-1) - 0.5 * (draft - accepted).sum(dim=-1)


def simulation(generator: Generator) -> list[Answer]:
    """Return the claims on expected rejections, compared with those of simulated texts."""
    errors = {}  # of formulas, in standard errors, by number of tokens and of drafts
    expected = {}
    for num_tokens, batches in ((50, (1, 2, 4, 8)), (100, (1, 2))):
        chains = Chains.random(num_tokens, VOCABULARY, generator)
        for num_drafts in batches:
            value = expected_rejections(chains, num_drafts)
            counts = simulated_rejections(chains, num_drafts, NUM_TEXTS, generator).double()
            error = counts.std().item() / NUM_TEXTS**0.5
            errors[num_tokens, num_drafts] = abs(counts.mean().item() - value) / error
            expected[num_tokens, num_drafts] = value
        expected[num_tokens, inf] = expected_rejections(chains, inf)
    of_50 = [value for (num_tokens, _), value in expected.items() if num_tokens == 50]
    falls = all(after < before for before, after in itertools.pairwise(of_50))
    batched = max(error for (_, num_drafts), error in errors.items() if num_drafts > 1)
    single = expected[50, 1]
    alone = errors[50, 1]
    return [
        Answer(
            "expected_rejections",
            f"{alone:.1f} standard errors from {NUM_TEXTS * 50:,} simulated tokens",
            alone < MOST_ERRORS,
        ),
        Answer(
            "batches",
            f"at most {batched:.1f} standard errors off; {single:.2f} rejections become"
            f" {expected[50, 8]:.2f}",
            max(errors.values()) < MOST_ERRORS and falls,
        ),
        Answer(
            "largest_batch",
            f"{expected[50, inf]:.2f} of {single:.2f} rejections stay",
            expected[50, inf] > 0,
        ),
    ]


def batch_improvement(generator: Generator) -> list[Answer]:
    """Return the claim on how many rejections a batch saves at one position, for models of two
    tokens and for uniform ones.
    """
    errors = []
    for size in (1, 2, 3, 5, 10, 100):
        for u, v in ((0.6, 0.5), (0.9, 0.5), (0.8, 0.3)):  # draft and target are 1 with these
            draft = torch.tensor([u, 1 - u], dtype=torch.float64)
            target = torch.tensor([v, 1 - v], dtype=torch.float64)
            formula = abs(u - v) * (1 - u ** (size - 1))
            errors.append(abs(_saved_by_batch(target, draft, size) - formula))
        for drafted, known in ((8, 4), (8, 2)):  # uniform on 8 tokens, and on 4 or 2 of them
            draft = torch.full((drafted,), 1 / drafted, dtype=torch.float64)
            target = torch.zeros(drafted, dtype=torch.float64)
            target[:known] = 1 / known
            part = 1 - known / drafted
            errors.append(abs(_saved_by_batch(target, draft, size) - (part - part**size)))
    return [equal("batch_improvement", max(errors))]


def _saved_by_batch(target: Tensor, draft: Tensor, size: int) -> float:
    _, replaced = after_batch(target, draft, size)
    return total_variation(target, draft).item() - replaced.sum().item()


def unbiased(generator: Generator) -> list[Answer]:
    """Return the claims that the emitted tokens have the target's distribution, by enumeration."""
    of_token = []
    of_block = []
    of_batches = []
    for _ in range(NUM_MODELS):
        chains = Chains.random(3, 4, generator, sharpness=1.5)
        of_token.append(bias(TokenVerification(), chains, 2))
        of_block.append(bias(BlockVerification(), chains, 2))
        target = chains.target[0, 0]
        for size in (2, 5):
            accepted, replaced = after_batch(target, chains.draft[0, 0], size)
            of_batches.append(total_variation(target, accepted + replaced).item())
    return [
        equal("token_unbiased", max(of_token)),
        equal("batches_unbiased", max(of_batches)),
        equal("block_unbiased", max(of_block)),
    ]


def lower_bound(generator: Generator) -> list[Answer]:
    """Return the claim on the least rejections of rules that test token by token."""
    errors = []
    more = 0
    for _ in range(NUM_MODELS):
        chains = Chains.random(5, 3, generator, sharpness=1.5)
        errors.append(abs(expected_rejections(chains) - fewest_rejections(chains)))
        token = tokens_per_round(TokenVerification(), chains, 4)
        more += tokens_per_round(BlockVerification(), chains, 4) > token + EXACT
    why = f"Block verification is no such rule: it emits more in {more} of {NUM_MODELS} models."
    return [equal("fewest_rejections", max(errors), why)]


def biased_rules(generator: Generator) -> list[Answer]:
    """Return the claims on what biased rules trade: rejections against the bias of the output.

    They are checked on `b = min(1, (t + eps) / d)`, and on 20,000 random rules.
    """
    chains = Chains.random(1, VOCABULARY, generator, sharpness=1.5)
    target = chains.target[0, 0]
    draft = chains.draft[0, 0]
    chains = Chains.constant(target, draft, 2)
    distance = total_variation(target, draft).item()
    from_formula = []
    above = []  # UNO's bias above OPT's
    from_line = []
    from_residual = []
    for eps in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0):
        opt = BiasedVerification(eps, "opt")
        rejection = max(0.0, 2 - tokens_per_round(opt, chains, 1))  # rounding may leave less
        of_opt = bias(opt, chains, 1)
        acceptance = accept_prob(target + eps, draft)
        from_formula.append(abs(least_bias(target, draft, acceptance).item() - of_opt))
        above.append(bias(BiasedVerification(eps, "uno"), chains, 1) - of_opt)
        from_line.append(abs(rejection + of_opt - distance))
        if eps < 1:  # appendix G; with 1 nothing is rejected
            after = (target - draft).clamp_min(-eps).clamp_min(0)
            expected = residual(target, acceptance * draft)
            from_residual.append((after / after.sum() - expected).abs().max().item())
    b = torch.rand((20_000, VOCABULARY), generator=generator, dtype=torch.float64)
    weights = torch.rand(b.shape, generator=generator, dtype=torch.float64)
    weights = -weights.clamp_min(1e-12).log()
    rejection = ((1 - b) * draft).sum(dim=1, keepdim=True)
    emitted = b * draft + rejection * weights / weights.sum(dim=1, keepdim=True)
    biases = total_variation(target, emitted)
    above_least = (biases - least_bias(target, draft, b)).min().item()
    above_line = (rejection.squeeze(1) + biases).min().item() - distance
    as_margin = accept_prob(target + (b * draft - target), draft)
    from_residual.append((as_margin - b).abs().max().item())
    return [
        Answer(
            "least_bias",
            f"closed form within {max(from_formula):.0e}; UNO {min(above):+.3f} to"
            f" {max(above):+.3f} above; of 20,000 random residuals the best is"
            f" {above_least:+.3f} above",
            max(from_formula) < EXACT and min(above_least, *above) > -EXACT,
        ),
        Answer(
            "line_of_bias",
            f"their sum is constant within {max(from_line):.0e}; the best of 20,000 random rules is"
            f" {above_line:+.3f} above",
            max(from_line) < EXACT and above_line > -EXACT,
        ),
        equal("margins", max(from_residual)),
    ]
