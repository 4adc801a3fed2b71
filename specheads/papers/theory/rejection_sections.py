"""Rejections: expected against simulated ones, batches of drafts, the least that is possible, and what biased rules trade.

Source: Yin et al. 2024, "A Theoretical Perspective for Speculative Decoding Algorithm".
"""

import itertools

import torch
from torch import Tensor

from specheads.decoding import verification
from specheads.pair.sampling import accept_prob
from specheads.papers.claims import CheckedClaim, Figure, Line, Section, equality
from specheads.papers.theory.rejections import (
    Chains,
    biased_step,
    expected_rejections,
    fewest_rejections,
    least_bias,
    limit_of_rejections,
    rejected,
    residual,
    simulated_rejections,
    total_variation,
)
from specheads.papers.theory.rounds import bias_of_batch, bias_of_first_two, enumerated_tokens_per_round

SOURCE = "Yin et al. 2024"
VOCABULARY = 7  # of the paper's simulations
MOST_ERRORS = 4.9  # standard errors that a right formula exceeds in one of a million simulations
EXACT = 1e-9


def simulation(generator: torch.Generator, num_texts: int) -> Section:
    """Return expected and simulated rejections of Markov chains that change with the position, by length and number of drafts.

    Args:
        num_texts: texts that are simulated for each row.
    """
    rows: list[list[str | float]] = []
    errors, curves = {}, {}
    for num_tokens, batches in ((50, (1, 2, 4, 8)), (100, (1, 2))):
        chains, expected = Chains.random(num_tokens, VOCABULARY, generator), []
        for num_drafts in batches:
            counts = simulated_rejections(chains, num_drafts, num_texts, generator).double()
            expected.append(expected_rejections(chains, num_drafts))
            mean, error = counts.mean().item(), counts.std().item() / num_texts**0.5
            errors[num_tokens, num_drafts] = abs(mean - expected[-1]) / error
            rows.append([num_tokens, num_drafts, expected[-1], mean, error, num_tokens / expected[-1]])
        limit = limit_of_rejections(chains)
        rows.append([num_tokens, "limit", limit, "-", "-", num_tokens / limit])
        curves[num_tokens] = (batches, expected, limit)
    batches, expected, limit = curves[50]
    falling = all(after < before for before, after in itertools.pairwise(expected))
    return Section(
        key="rejections",
        title=f"Rejections by the number of drafts in a batch; {VOCABULARY} tokens",
        source=f"{SOURCE}, theorems 1 and 3, section 3 and appendix F",
        columns=("tokens", "drafts", "expected", "simulated", "error", "tokens per rejection"),
        rows=rows,
        claims=_simulated_claims(errors, num_texts, expected, limit, falling),
        figure=Figure(
            "drafts in a batch",
            "rejections in 50 tokens",
            [Line("expected", batches, expected), Line("limit", (batches[0], batches[-1]), (limit, limit))],
        ),
    )


def _simulated_claims(
    errors: dict[tuple[int, int], float], num_texts: int, expected: list[float], limit: float, falling: bool
) -> list[CheckedClaim]:
    """Return the claims that a simulation checks; `errors` by number of tokens and of drafts, in standard errors."""
    alone, batched = errors[50, 1], max(error for (_, drafts), error in errors.items() if drafts > 1)
    return [
        CheckedClaim(
            ("theory_theorem1_rejections", "theory_simulation", "theory_figure2a", "theory_remark2"),
            "Expected rejections are the sum of the total variations between target and draft.",
            f"{alone:.1f} standard errors from {num_texts * 50:,} simulated tokens",
            "equality; 16.41 rejections in 50 tokens of chains that are not stated",
            "held" if alone < MOST_ERRORS else "did not hold",
        ),
        CheckedClaim(
            ("theory_theorem3_rejections", "theory_figure2b", "theory_figure5"),
            "A batch of drafts is rejected less often, by a recursion over the position of the last rejection.",
            f"at most {batched:.1f} standard errors off; {expected[0]:.2f} rejections become {expected[-1]:.2f}",
            "equality",
            "held" if max(errors.values()) < MOST_ERRORS and falling else "did not hold",
        ),
        CheckedClaim(
            ("theory_figure2c", "theory_proposition1"),
            "However large the batch, rejections do not vanish.",
            f"{limit:.2f} of {expected[0]:.2f} rejections stay",
            "above 0",
            "held" if limit > 0 else "did not hold",
            why="Only the first token after a rejection is drafted in a batch.",
        ),
    ]


def batch_improvement() -> Section:
    """Return how many rejections a batch saves at one position, for models of two tokens and for uniform ones."""
    sizes = (1, 2, 3, 5, 10, 100)
    wrong: list[float] = []
    rows: list[list[str | float]] = []
    for u, v in ((0.6, 0.5), (0.9, 0.5), (0.8, 0.3)):  # draft and target are 1 with these probabilities
        draft, target = (torch.tensor([p, 1 - p], dtype=torch.float64) for p in (u, v))
        saved, formula = _saved(target, draft, sizes), [abs(u - v) * (1 - u ** (size - 1)) for size in sizes]
        wrong += [abs(a - b) for a, b in zip(saved, formula, strict=True)]
        rows.append([f"Ber({u}), Ber({v})", *saved])
    for drafted, known in ((8, 4), (8, 2)):
        draft = torch.full((drafted,), 1 / drafted, dtype=torch.float64)
        target = torch.cat([torch.full((known,), 1 / known), torch.zeros(drafted - known)]).double()
        part = 1 - known / drafted
        saved, formula = _saved(target, draft, sizes), [part - part**size for size in sizes]
        rows.append([f"uniform on {drafted}, on {known}", *saved])
        wrong += [abs(a - b) for a, b in zip(saved, formula, strict=True)]
    return Section(
        key="batch_improvement",
        title="Rejections that a batch of drafts saves at one position, by its size",
        source=f"{SOURCE}, section 3.2 and figure 3",
        columns=("draft, target", *map(str, sizes)),
        rows=rows,
        claims=[
            equality(
                ("theory_figure3_bernoulli", "theory_figure3_uniform", "theory_batch_limit"),
                "For Bernoulli and uniform models the improvement has a closed form that grows to the total variation.",
                max(wrong),
                EXACT,
                "|u - v| (1 - u^(M-1)); (1 - 1/r) - (1 - 1/r)^M",
            )
        ],
    )


def _saved(target: Tensor, draft: Tensor, sizes: tuple[int, ...]) -> list[float]:
    alone = total_variation(target, draft).item()
    return [alone - rejected(target, draft, size).sum().item() for size in sizes]


def unbiased(generator: torch.Generator, num_models: int = 20) -> Section:
    """Return how far the emitted tokens are from the target's distribution, by enumeration."""
    rules = verification.TokenVerification(), verification.BlockVerification()
    biases: dict[str, list[float]] = {name: [] for name in (*(rule.label for rule in rules), "batches of 2 and 5 drafts")}
    for _ in range(num_models):
        chains = Chains.random(3, 4, generator, sharpness=1.5)
        for rule in rules:
            biases[rule.label].append(bias_of_first_two(rule, chains))
        first = chains.target[0, 0], chains.draft[0, 0]
        biases["batches of 2 and 5 drafts"] += [bias_of_batch(*first, num_drafts) for num_drafts in (2, 5)]
    token, block, batch = (max(each) for each in biases.values())
    return Section(
        key="unbiased",
        title=f"Total variation between the first tokens and the target's, {num_models} models of 4 tokens",
        source=f"{SOURCE}, theorems 1 and 3; Sun et al. 2024, theorem 1",
        columns=("verification", "largest", "tokens compared"),
        rows=[[name, f"{max(each):.0e}", 1 if name.startswith("batches") else 2] for name, each in biases.items()],
        claims=[
            equality(
                ("theory_theorem1_unbiased", "theory_corollary1"),
                "Speculative decoding has the target's distribution.",
                token,
                1e-6,
            ),
            equality(("theory_theorem3_unbiased",), "Batches have the target's distribution.", batch, EXACT),
            equality(("block_theorem1", "block_figure2"), "Block verification has the target's distribution.", block, 1e-6),
        ],
    )


def lower_bound(generator: torch.Generator, num_models: int = 20) -> Section:
    """Return the least rejections of rules that test token by token, those of token verification, and block verification's.

    Args:
        num_models: random pairs of chains, of 5 tokens of 3.
    """
    gaps, more, rows = [], 0, []
    for number in range(num_models):
        chains = Chains.random(5, 3, generator, sharpness=1.5)
        token, least = expected_rejections(chains), fewest_rejections(chains)
        gaps.append(abs(token - least))
        rules = verification.TokenVerification(), verification.BlockVerification()
        per_round = [enumerated_tokens_per_round(rule, chains, 4) for rule in rules]
        more += per_round[1] > per_round[0] + EXACT
        if number < 3:
            rows.append([number + 1, least, token, *per_round])
    return Section(
        key="lower_bound",
        title="The fewest rejections without a bias, in 5 tokens of 3 (three of the models)",
        source=f"{SOURCE}, theorem 2",
        columns=("model", "least possible", "token verification", "tokens per round", "of block verification"),
        rows=rows,
        claims=[
            equality(
                ("theory_theorem2", "theory_lemma2"),
                "No unbiased rule that tests token by token rejects less often than token verification.",
                max(gaps),
                EXACT,
                why=f"Block verification is no such rule: it emits more in {more} of {num_models} models.",
            )
        ],
    )


def pareto_front(generator: torch.Generator) -> Section:
    """Return what biased rules trade: probability of a rejection against the distance of the output from the target."""
    chains = Chains.random(1, VOCABULARY, generator, sharpness=1.5)
    target, draft = chains.target[0, 0], chains.draft[0, 0]
    distance = total_variation(target, draft).item()
    tolerances = [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0]
    steps = [biased_step(target, draft, eps) for eps in tolerances]
    rows = [
        [eps, step.rejection, step.bias_opt, step.rejection + step.bias_opt, step.bias_uno]
        for eps, step in zip(tolerances, steps, strict=True)
    ]
    rejections = [step.rejection for step in steps]
    return Section(
        key="pareto",
        title=f"Accepting more than is unbiased, at a total variation of {distance:.3f} between target and draft",
        source=f"{SOURCE}, section 4 and appendix G",
        columns=("eps", "rejected", "bias (OPT)", "their sum", "bias (UNO)"),
        rows=rows,
        claims=_biased_claims(target, draft, tolerances, generator),
        figure=Figure(
            "probability of a rejection",
            "total variation of the output",
            [
                Line("OPT", rejections, [step.bias_opt for step in steps]),
                Line("UNO", rejections, [step.bias_uno for step in steps]),
            ],
        ),
    )


def _biased_claims(target: Tensor, draft: Tensor, tolerances: list[float], generator: torch.Generator) -> list[CheckedClaim]:
    """Return the claims on biased rules, checked on `b = min(1, (t + eps) / d)` and on 20,000 random rules."""
    steps = [biased_step(target, draft, eps) for eps in tolerances]
    distance = total_variation(target, draft).item()
    acceptance = [accept_prob(target + eps, draft) for eps in tolerances]
    closed = [abs(least_bias(target, draft, b).item() - step.bias_opt) for b, step in zip(acceptance, steps, strict=True)]
    line = max(abs(step.rejection + step.bias_opt - distance) for step in steps)
    above = [step.bias_uno - step.bias_opt for step in steps]
    after = [(target - draft).clamp_min(-eps) for eps in tolerances]  # appendix G
    same = max(
        (each.clamp_min(0) / each.clamp_min(0).sum() - residual(target, b * draft)).abs().max().item()
        for each, b in zip(after[:-1], acceptance[:-1], strict=True)
    )
    shape = (20_000, len(target))
    b = torch.rand(shape, generator=generator, dtype=torch.float64)
    weights = -torch.rand(shape, generator=generator, dtype=torch.float64).clamp_min(1e-12).log()
    rejection = ((1 - b) * draft).sum(dim=1, keepdim=True)
    bias = total_variation(target, b * draft + rejection * weights / weights.sum(dim=1, keepdim=True))
    below_least = (bias - least_bias(target, draft, b)).min().item()
    below_line = (rejection.squeeze(1) + bias).min().item() - distance
    written = (accept_prob(target + (b * draft - target), draft) - b).abs().max().item()
    return [
        CheckedClaim(
            ("theory_theorem4",),
            "The least bias of an acceptance rule has a closed form, and OPT's residual reaches it; UNO's does not.",
            f"closed form within {max(closed):.0e}; UNO {min(above):+.3f} to {max(above):+.3f} above; of 20,000 random residuals "
            f"the best is {below_least:+.3f} above",
            "1/2 sum |t - b d| - 1/2 sum (1 - b) d",
            "held" if max(closed) < EXACT and below_least > -EXACT and min(above) > -EXACT else "did not hold",
        ),
        CheckedClaim(
            ("theory_theorem5", "theory_figure4a", "theory_figure4bc"),
            "Rejections and least bias lie on a straight line that no rule gets below.",
            f"their sum is constant within {line:.0e}; the best of 20,000 random rules is {below_line:+.3f} above",
            "P(reject) + bias = total variation",
            "held" if line < EXACT and below_line > -EXACT else "did not hold",
        ),
        equality(
            ("theory_lemma1", "theory_appendix_g"),
            "Any acceptance is min(1, (t + eps) / d) for some eps, and OPT's residual then is max(t - d, -eps), positive part.",
            max(same, written),
            EXACT,
        ),
    ]
