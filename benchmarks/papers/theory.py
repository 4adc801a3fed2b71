"""The claims of the papers' theory by enumeration: which rules keep the target's distribution, what
biased ones trade, and how many tokens a round emits.

Sources: Yin et al. 2024, "A Theoretical Perspective for Speculative Decoding Algorithm", and Sun et
al. 2024 (block verification). What needed simulations or linear programmes was computed once:
`claims/theory_earlier.json` names the commit that has the code.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Generator, Tensor

from benchmarks.papers.chains import (
    Chains,
    bias,
    every_draft,
    residual,
    tokens_per_round,
    total_variation,
)
from benchmarks.papers.measures import CheckedClaim
from specheads.decoding.verification import BlockVerification, TokenVerification
from specheads.pair.sampling import accept_prob
from specheads.papers import BiasedVerification

TEXTS = Path(__file__).with_name("theory.yaml")
OUTCOMES = {True: "held", False: "did not hold"}
NUM_MODELS = 20
VOCABULARY = 7  # the tokens of the biased rules
EXACT = 1e-9


class Answer(NamedTuple):
    """What was computed for a claim of theory.yaml, by its name there."""

    name: str
    ours: str
    holds: bool
    ratio: float | None = None


def equal(name: str, error: float) -> Answer:
    """Return that two numbers are equal, if rounding can explain their difference."""
    return Answer(name, f"equal within {error:.0e}", error <= EXACT)


def least_bias(target: Tensor, draft: Tensor, acceptance: Tensor) -> Tensor:
    """Return the least total variation (...) of a rule that accepts token x with probability
    `acceptance` (..., V).

    It is `1/2 sum |t - b d| - 1/2 sum (1 - b) d` (theorem 4).
    """
    accepted = acceptance * draft
    return 0.5 * (target - accepted).abs().sum(dim=-1) - 0.5 * (draft - accepted).sum(dim=-1)


def most_tokens_per_round(chains: Chains, num_drafted: int) -> float:
    """Return the most tokens that a lossless rule can emit in a round: the value of an optimal
    transport.

    Drafts and texts of the target agree on a first i tokens with probability `sum_s min(T(s),
    D(s))` at most, T and D the probabilities of i tokens (Sun et al. 2024, lemma 8). Rules reach it
    only if later rounds depend on how this one ended.
    """
    total = 1.0
    for count in range(1, num_drafted + 1):
        _, block = every_draft(chains, count)
        draft_prob, target_prob = block.drafted_probs()
        total += torch.minimum(draft_prob.prod(dim=1), target_prob.prod(dim=1)).sum().item()
    return total


def unbiased(generator: Generator) -> list[Answer]:
    """Return the claims that the emitted tokens have the target's distribution, by enumeration."""
    of_token = []
    of_block = []
    for _ in range(NUM_MODELS):
        chains = Chains.random(3, 4, generator, sharpness=1.5)
        of_token.append(bias(TokenVerification(), chains, 2))
        of_block.append(bias(BlockVerification(), chains, 2))
    return [
        equal("token_unbiased", max(of_token)),
        equal("block_unbiased", max(of_block)),
    ]


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


def worked_example(generator: Generator) -> list[Answer]:
    """Return the claim on the paper's example: two tokens, a target of 1/3 and 2/3, a draft of 2/3
    and 1/3, two drafted tokens.
    """
    target = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    chains = Chains.constant(target, target.flip(0), 3)
    token = tokens_per_round(TokenVerification(), chains, 2) - 1
    block = tokens_per_round(BlockVerification(), chains, 2) - 1
    most = most_tokens_per_round(chains, 2) - 1
    wrong = max(abs(token - 10 / 9), abs(block - 11 / 9), abs(most - 12 / 9))
    ours = f"{token * 9:.3f}/9 / {block * 9:.3f}/9 / {most * 9:.3f}/9"
    return [Answer("worked_example", ours, wrong < 1e-6, ratio=block / (11 / 9))]


def verification_rules(generator: Generator) -> list[Answer]:
    """Return the claims on tokens per round, on 20 random pairs of chains of 3 tokens, for 3
    drafted tokens.
    """
    over_block = []
    single = []
    for _ in range(NUM_MODELS):
        chains = Chains.random(4, 3, generator, sharpness=1.5)
        block = tokens_per_round(BlockVerification(), chains, 3)
        over_block.append(most_tokens_per_round(chains, 3) / block - 1)
        of_token = tokens_per_round(TokenVerification(), chains, 1)
        single.append(abs(tokens_per_round(BlockVerification(), chains, 1) - of_token))
    return [
        Answer(
            "optimal_transport",
            f"{sum(over_block) / len(over_block):+.1%} over block verification on average, at least"
            f" {min(over_block):+.1%}",
            min(over_block) > -EXACT,
        ),
        equal("one_token", max(single)),
    ]


SUBJECTS: tuple[Callable[[Generator], list[Answer]], ...] = (
    unbiased,
    biased_rules,
    worked_example,
    verification_rules,
)


def claims() -> list[CheckedClaim]:
    """Return all claims; each subject has the same seed, so that none depends on another."""
    texts = yaml.safe_load(TEXTS.read_text())
    found = []
    for subject in SUBJECTS:
        for answer in subject(Generator().manual_seed(0)):
            text = texts[answer.name]
            claim = CheckedClaim(
                text["claims"],
                text["says"],
                answer.ours,
                text["published"],
                OUTCOMES[answer.holds],
                answer.ratio,
                text.get("why", ""),
            )
            found.append(claim)
    return found
