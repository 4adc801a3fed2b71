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
from torch import Tensor

from specheads.decoding.verification import BlockVerification, TokenVerification
from specheads.pair.sampling import accept_prob, sample
from specheads.papers.biased import MODES, BiasedVerification
from specheads.papers.claims import CheckedClaim, ReportSection, computed, equality
from specheads.papers.theory.chains import Chains, bias, residual, tokens_per_round, total_variation

SOURCE = "Yin et al. 2024"
VOCABULARY = 7  # the tokens of the paper's simulations
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
    batch drafted.
    """
    vocab_size = chains.target.shape[-1]
    fresh = torch.zeros(
        vocab_size, dtype=torch.float64
    )  # probability of each last token that a batch follows
    fresh[0] = 1.0
    going_on = torch.zeros_like(fresh)
    total = 0.0
    (_, of_batch), (_, alone) = (
        after_batch(chains.target, chains.draft, number) for number in (num_drafts, 1)
    )
    for target, in_batch, by_itself in zip(chains.target, of_batch, alone, strict=True):
        replaced = fresh @ in_batch + going_on @ by_itself
        total += replaced.sum().item()
        emitted = (fresh + going_on) @ target
        fresh = replaced
        going_on = emitted - replaced
    return total


def fewest_rejections(chains: Chains) -> float:
    """Return the least expected number of rejections of all rules that test tokens one by one and
    keep the target's distribution.

    Such a rule accepts a drafted token x with some probability b(x). It can keep the distribution
    only if `b d <= t`, so it accepts no more than `sum min(t, d)` anywhere (theorem 2).
    """
    last = torch.zeros(chains.target.shape[-1], dtype=torch.float64)
    total = 0.0
    last[0] = 1.0
    for target, draft in zip(chains.target, chains.draft, strict=True):
        total += (last * (1 - torch.minimum(target, draft).sum(dim=-1))).sum().item()
        last = last @ target
    return total


def simulated_rejections(
    chains: Chains, num_drafts: int, num_texts: int, generator: torch.Generator
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
            chance = accept_prob(
                *(each.gather(1, sampled[:, None]).squeeze(1) for each in (left, of_draft))
            )
            passes = tested & (uniforms() < chance)
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


def simulation(generator: torch.Generator, num_texts: int) -> ReportSection:
    """Return expected rejections of Markov chains by length and number of drafts, and those in
    `num_texts` texts for each row.
    """
    rows: list[list[str | float]] = []
    errors: dict[
        tuple[int, int], float
    ] = {}  # errors of formulas, in standard errors, by number of tokens and of drafts
    falling: dict[
        int, list[float]
    ] = {}  # what is expected with more and more drafts, by number of tokens
    for num_tokens, batches in ((50, (1, 2, 4, 8)), (100, (1, 2))):
        chains = Chains.random(num_tokens, VOCABULARY, generator)
        falling[num_tokens] = [expected_rejections(chains, number) for number in (*batches, inf)]
        for num_drafts, expected in zip(batches, falling[num_tokens], strict=False):
            counts = simulated_rejections(chains, num_drafts, num_texts, generator).double()
            mean = counts.mean().item()
            error = counts.std().item() / num_texts**0.5
            errors[num_tokens, num_drafts] = abs(mean - expected) / error
            rows.append([num_tokens, num_drafts, expected, mean, error, num_tokens / expected])
        limit = falling[num_tokens][-1]
        rows.append([num_tokens, "limit", limit, "-", "-", num_tokens / limit])
    *expected_by_batch, limit = falling[50]
    falls = all(after < before for before, after in itertools.pairwise(expected_by_batch))
    alone = errors[50, 1]
    batched = max(error for (_, drafts), error in errors.items() if drafts > 1)
    claims = [
        computed(
            (
                "theory_theorem1_rejections",
                "theory_simulation",
                "theory_figure2a",
                "theory_remark2",
            ),
            "Expected rejections are the sum of the total variations between target and draft.",
            f"{alone:.1f} standard errors from {num_texts * 50:,} simulated tokens",
            "equality; 16.41 rejections in 50 tokens of chains that are not stated",
            alone < MOST_ERRORS,
        ),
        computed(
            ("theory_theorem3_rejections", "theory_figure2b", "theory_figure5"),
            "A batch of drafts is rejected less often, by a recursion over the position of the last"
            " rejection.",
            f"at most {batched:.1f} standard errors off; {falling[50][0]:.2f} rejections become"
            f" {expected_by_batch[-1]:.2f}",
            "equality",
            max(errors.values()) < MOST_ERRORS and falls,
        ),
        computed(
            ("theory_figure2c", "theory_proposition1"),
            "However large the batch, rejections do not vanish.",
            f"{limit:.2f} of {falling[50][0]:.2f} rejections stay",
            "above 0",
            limit > 0,
            why="Only the first token after a rejection is drafted in a batch.",
        ),
    ]
    return ReportSection(
        key="rejections",
        title=f"Rejections by the number of drafts in a batch; {VOCABULARY} tokens",
        source=f"{SOURCE}, theorems 1 and 3, section 3 and appendix F",
        columns=("tokens", "drafts", "expected", "simulated", "error", "tokens per rejection"),
        rows=rows,
        claims=claims,
    )


def batch_improvement() -> ReportSection:
    """Return how many rejections a batch saves at one position, for models of two tokens and for
    uniform ones.
    """
    sizes = (1, 2, 3, 5, 10, 100)
    wrong: list[float] = []
    rows: list[list[str | float]] = []

    def compare(name: str, target: Tensor, draft: Tensor, formula: list[float]) -> None:
        alone = total_variation(target, draft).item()
        saved = [alone - after_batch(target, draft, size)[1].sum().item() for size in sizes]
        rows.append([name, *saved])
        wrong.extend(abs(a - b) for a, b in zip(saved, formula, strict=True))

    for u, v in (
        (0.6, 0.5),
        (0.9, 0.5),
        (0.8, 0.3),
    ):  # draft and target are 1 with these probabilities
        draft, target = (torch.tensor([p, 1 - p], dtype=torch.float64) for p in (u, v))
        compare(
            f"Ber({u}), Ber({v})",
            target,
            draft,
            [abs(u - v) * (1 - u ** (size - 1)) for size in sizes],
        )
    for drafted, known in ((8, 4), (8, 2)):
        draft = torch.full((drafted,), 1 / drafted, dtype=torch.float64)
        target = torch.cat([torch.full((known,), 1 / known), torch.zeros(drafted - known)]).double()
        part = 1 - known / drafted
        compare(
            f"uniform on {drafted}, on {known}",
            target,
            draft,
            [part - part**size for size in sizes],
        )
    claim = equality(
        ("theory_figure3_bernoulli", "theory_figure3_uniform", "theory_batch_limit"),
        "For Bernoulli and uniform models the improvement has a closed form that grows to the total"
        " variation.",
        max(wrong),
        EXACT,
        "|u - v| (1 - u^(M-1)); (1 - 1/r) - (1 - 1/r)^M",
    )
    return ReportSection(
        key="batch_improvement",
        title="Rejections that a batch of drafts saves at one position, by its size",
        source=f"{SOURCE}, section 3.2 and figure 3",
        columns=("draft, target", *map(str, sizes)),
        rows=rows,
        claims=[claim],
    )


def unbiased(generator: torch.Generator, num_models: int = 20) -> ReportSection:
    """Return how far the emitted tokens are from the target's distribution, by enumeration."""
    rules = (TokenVerification(), BlockVerification())
    biases = []
    for _ in range(num_models):
        chains = Chains.random(3, 4, generator, sharpness=1.5)
        target = chains.target[0, 0]
        draft = chains.draft[0, 0]
        batches = [
            total_variation(target, torch.add(*after_batch(target, draft, number))).item()
            for number in (2, 5)
        ]
        biases.append((*(bias(rule, chains, 2) for rule in rules), max(batches)))
    token, block, batch = map(max, zip(*biases, strict=True))
    rows: list[list[str | float]] = [
        [rule.label, f"{error:.0e}", 2] for rule, error in zip(rules, (token, block), strict=True)
    ]
    return ReportSection(
        key="unbiased",
        title=(
            f"Total variation between the first tokens and the target's, {num_models} models of 4"
            " tokens"
        ),
        source=f"{SOURCE}, theorems 1 and 3; Sun et al. 2024, theorem 1",
        columns=("verification", "largest", "tokens compared"),
        rows=[*rows, ["batches of 2 and 5 drafts", f"{batch:.0e}", 1]],
        claims=[
            equality(
                ("theory_theorem1_unbiased", "theory_corollary1"),
                "Speculative decoding has the target's distribution.",
                token,
                1e-6,
            ),
            equality(
                ("theory_theorem3_unbiased",),
                "Batches have the target's distribution.",
                batch,
                EXACT,
            ),
            equality(
                ("block_theorem1", "block_figure2"),
                "Block verification has the target's distribution.",
                block,
                1e-6,
            ),
        ],
    )


def lower_bound(generator: torch.Generator, num_models: int = 20) -> ReportSection:
    """Return the least rejections of rules that test token by token, and those of token and block
    verification, by model.
    """
    rows = []
    for number in range(num_models):
        chains = Chains.random(5, 3, generator, sharpness=1.5)
        per_round = [
            tokens_per_round(rule, chains, 4) for rule in (TokenVerification(), BlockVerification())
        ]
        rows.append(
            [number + 1, fewest_rejections(chains), expected_rejections(chains), *per_round]
        )
    more = sum(block > token + EXACT for *_, token, block in rows)
    claim = equality(
        ("theory_theorem2", "theory_lemma2"),
        "No unbiased rule that tests token by token rejects less often than token verification.",
        max(abs(token - least) for _, least, token, *_ in rows),
        EXACT,
        why=f"Block verification is no such rule: it emits more in {more} of {num_models} models.",
    )
    return ReportSection(
        key="lower_bound",
        title="The fewest rejections without a bias, in 5 tokens of 3 (three of the models)",
        source=f"{SOURCE}, theorem 2",
        columns=(
            "model",
            "least possible",
            "token verification",
            "tokens per round",
            "of block verification",
        ),
        rows=rows[:3],
        claims=[claim],
    )


def pareto_front(generator: torch.Generator) -> ReportSection:
    """Return what biased rules trade: probability of a rejection against the distance of the output
    from the target.
    """
    chains = Chains.random(1, VOCABULARY, generator, sharpness=1.5)
    target = chains.target[0, 0]
    draft = chains.draft[0, 0]
    rows = []
    chains = Chains.constant(target, draft, 2)
    for eps in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0):
        opt, uno = (BiasedVerification(eps, mode) for mode in MODES)
        rejection = max(0.0, 2 - tokens_per_round(opt, chains, 1))  # rounding may leave less
        least = bias(opt, chains, 1)
        rows.append([eps, rejection, least, rejection + least, bias(uno, chains, 1)])
    return ReportSection(
        key="pareto",
        title=(
            "Accepting more than is unbiased, at a total variation of "
            f"{total_variation(target, draft).item():.3f} between target and draft"
        ),
        source=f"{SOURCE}, section 4 and appendix G",
        columns=("eps", "rejected", "bias (OPT)", "their sum", "bias (UNO)"),
        rows=rows,
        claims=_biased_claims(target, draft, rows, generator),
    )


def _biased_claims(
    target: Tensor, draft: Tensor, rows: list[list[float]], generator: torch.Generator
) -> list[CheckedClaim]:
    """Return the claims on biased rules, checked on `b = min(1, (t + eps) / d)`, the `rows`, and on
    20,000 random rules.
    """
    distance = total_variation(target, draft).item()
    same = []
    acceptance = {eps: accept_prob(target + eps, draft) for eps, *_ in rows}
    closed = max(
        abs(least_bias(target, draft, acceptance[eps]).item() - opt) for eps, _, opt, *_ in rows
    )
    above = [uno - opt for _, _, opt, _, uno in rows]
    line = max(abs(total - distance) for *_, total, _ in rows)
    for eps, b in list(acceptance.items())[:-1]:  # appendix G; with the last nothing is rejected
        after = (target - draft).clamp_min(-eps).clamp_min(0)
        same.append((after / after.sum() - residual(target, b * draft)).abs().max().item())
    shape = (20_000, len(target))
    b = torch.rand(shape, generator=generator, dtype=torch.float64)
    weights = -torch.rand(shape, generator=generator, dtype=torch.float64).clamp_min(1e-12).log()
    rejection = ((1 - b) * draft).sum(dim=1, keepdim=True)
    biases = total_variation(
        target, b * draft + rejection * weights / weights.sum(dim=1, keepdim=True)
    )
    below_least = (biases - least_bias(target, draft, b)).min().item()
    below_line = (rejection.squeeze(1) + biases).min().item() - distance
    same.append((accept_prob(target + (b * draft - target), draft) - b).abs().max().item())
    return [
        computed(
            ("theory_theorem4",),
            "The least bias of an acceptance rule has a closed form, and OPT's residual reaches it;"
            " UNO's does not.",
            f"closed form within {closed:.0e}; UNO {min(above):+.3f} to {max(above):+.3f} above; of"
            f" 20,000 random residuals the best is {below_least:+.3f} above",
            "1/2 sum |t - b d| - 1/2 sum (1 - b) d",
            closed < EXACT and below_least > -EXACT and min(above) > -EXACT,
        ),
        computed(
            ("theory_theorem5", "theory_figure4a", "theory_figure4bc"),
            "Rejections and least bias lie on a straight line that no rule gets below.",
            f"their sum is constant within {line:.0e}; the best of 20,000 random rules is"
            f" {below_line:+.3f} above",
            "P(reject) + bias = total variation",
            line < EXACT and below_line > -EXACT,
        ),
        equality(
            ("theory_lemma1", "theory_appendix_g"),
            "Any acceptance is min(1, (t + eps) / d) for some eps, and OPT's residual then is max(t"
            " - d, -eps), positive part.",
            max(same),
            EXACT,
        ),
    ]
