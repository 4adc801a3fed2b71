"""Tokens per round of the verification rules by enumeration, against the most that is possible, and
blocks chosen jointly.

Sources: Sun et al. 2024 (block verification), Sun et al. 2023 (SpecTr), Qin et al. 2024 (MJSD).
"""

import itertools
from functools import cache

import torch
from sympy import Matrix, Rational
from sympy.solvers.simplex import linprog
from torch import Tensor

from specheads.decoding.verification import BlockVerification, TokenVerification, VerificationRule
from specheads.papers.claims import CheckedClaim, ReportSection, computed, equality
from specheads.papers.mjsd import JointVerification
from specheads.papers.spectr import SpecTr
from specheads.papers.theory.chains import Chains, every_draft, tokens_per_round
from specheads.papers.theory.rejections import EXACT
from specheads.papers.trees.verification import ROOT, Draft, MultiRound, TreeBlock, TreeVerification

CHAIN_RULES = TokenVerification(), BlockVerification()


def _tokens_of_samples(
    rule: TreeVerification, chains: Chains, num_drafted: int, num_drafts: int
) -> float:
    """Return the expected tokens of the first round where `num_drafts` independent drafts of K
    tokens are verified together.

    Only the number of drafts that begin with the accepted tokens matters, so every set of next
    tokens is enumerated at each last token.
    """

    @cache
    def accepted(place: int, last: int, drafts: int) -> float:
        if place == num_drafted:
            return 0.0
        draft, target = (each[place, last] for each in (chains.draft, chains.target))
        total = 0.0
        for sampled in itertools.product(range(len(draft)), repeat=drafts):
            chance = draft[list(sampled)].prod().item()
            for token, move in _moves(rule, sampled, draft, target).items():
                total += chance * move * (1 + accepted(place + 1, token, sampled.count(token)))
        return total

    return 1 + accepted(0, 0, num_drafts)


def _moves(
    rule: TreeVerification, sampled: tuple[int, ...], draft: Tensor, target: Tensor
) -> dict[int, float]:
    """Return by sampled token the probability that it is accepted at a node."""
    tree = Draft(draft_probs=draft[None])
    for token in sampled:
        tree.add(ROOT, token, merge=True)
    block = TreeBlock.of(tree, target.expand(len(tree) + 1, -1))
    return dict(zip(tree.tokens, rule.distribution(block).moves.tolist(), strict=True))


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
        total += torch.minimum(*(each.prod(dim=1) for each in block.drafted_probs())).sum().item()
    return total


def _largest(objective: Tensor, rows: Tensor, limits: Tensor) -> float:
    """Return the largest `objective @ x` of x >= 0 with `rows @ x <= limits`, by the simplex method
    in exact fractions.
    """
    parts = -objective[None], limits[None], rows
    (costs,), (bounds,), matrix = (
        [[Rational(each) for each in row] for row in part.tolist()] for part in parts
    )
    return -float(linprog(costs, Matrix(matrix), bounds)[0])


def kept_worth(
    rule: VerificationRule | None, chains: Chains, num_drafted: int, gains: Tensor
) -> float:
    """Return the expected sum of `gains` (V^K, K), one for each kept token of a draft.

    None: the most of all lossless rules.

    A rule keeps i tokens or more of draft x with probability a_i(x). It is lossless where it keeps
    the text s y at most t(y | s) times as often as s; it samples the rest (Sun et al. 2024, lemma
    2). It may know both models off the draft as well.
    """
    probability, block = every_draft(chains, num_drafted)
    if rule is not None:
        return (probability @ (rule.distribution(block).survival.double() * gains)).sum().item()
    target = block.drafted_probs()[1]
    vocab_size = chains.target.shape[-1]
    count = len(probability)
    place = torch.eye(num_drafted + 1).double()
    drafts = torch.eye(count).double()
    rows = [torch.kron(drafts, place - place.roll(1, dims=0).tril())]  # a_0 <= 1, a_i <= a_{i-1}
    for kept in range(num_drafted):
        longer = (
            drafts.view(vocab_size ** (kept + 1), -1, count).sum(dim=1) * probability
        )  # of the drafts that begin with s y
        shorter = longer.view(-1, vocab_size, count).sum(dim=1).repeat_interleave(vocab_size, dim=0)
        following = target[:, kept].view(len(longer), -1)[:, :1]
        rows.append(
            torch.kron(longer, place[[kept + 1]]) - torch.kron(following * shorter, place[[kept]])
        )
    objective = torch.nn.functional.pad(gains * probability[:, None], (1, 0)).flatten()
    limits = torch.zeros(sum(map(len, rows))).double()
    limits[: len(objective) : num_drafted + 1] = 1
    return _largest(objective, torch.cat(rows), limits)


def tokens_after(
    rule: VerificationRule | None, chains: Chains, num_drafted: int, rounds: int
) -> float:
    """Return the expected tokens after some rounds under a lossless rule.

    None: the most of all that start each round afresh.
    """
    if not rounds:
        return 0.0
    probability, block = every_draft(chains, num_drafted)
    ends = torch.zeros(
        num_drafted + 1, chains.target.shape[-1]
    ).double()  # by length and last token of what the round emits
    for place, token in itertools.product(*map(range, ends.shape)):
        later = chains.after(place + 1, token)
        ends[place, token] = place + 1 + tokens_after(rule, later, num_drafted, rounds - 1)
    sampled = (block.target_probs * ends).sum(
        dim=-1
    )  # of a round that ends with a token of the target after i tokens
    gains = sampled[:, 1:] - ends[:-1].expand(len(probability), -1, -1).gather(
        2, block.tokens[..., None]
    ).squeeze(2)
    return sampled[0, 0].item() + kept_worth(rule, chains, num_drafted, gains)


def most_likely_blocks(chains: Chains, num_tokens: int, block: int) -> float:
    """Return the log-likelihood in nats of `num_tokens` that are chosen `block` at a time, each
    block the most likely of all.

    Source: multi-token joint greedy decoding (Qin et al. 2024, section 3), by enumeration.
    """
    logs = chains.target.log().tolist()
    last = 0
    total = 0.0
    for start in range(0, num_tokens, block):
        values = []
        for tokens in itertools.product(range(len(logs[0])), repeat=min(block, num_tokens - start)):
            steps = enumerate(zip((last, *tokens), tokens, strict=False), start)
            values.append(
                (sum(logs[place][before][token] for place, (before, token) in steps), tokens)
            )
        nats, tokens = max(values)
        total = total + nats
        last = tokens[-1]
    return total


def worked_example() -> ReportSection:
    """Return the paper's example: two tokens, a target of 1/3 and 2/3, a draft of 2/3 and 1/3, two
    drafted tokens.
    """
    target, draft = (
        torch.tensor(each, dtype=torch.float64) for each in ((1 / 3, 2 / 3), (2 / 3, 1 / 3))
    )
    chains = Chains.constant(target, draft, 3)
    published = (10 / 9, 11 / 9, 12 / 9)
    accepted = [
        *(tokens_per_round(rule, chains, 2) - 1 for rule in CHAIN_RULES),
        most_tokens_per_round(chains, 2) - 1,
    ]
    wrong = max(abs(ours - theirs) for ours, theirs in zip(accepted, published, strict=True))
    names = [*(rule.label for rule in CHAIN_RULES), "optimal transport"]
    claim = CheckedClaim(
        ("block_lemma1",),
        "In the example block verification accepts more than token verification, and an ideal rule"
        " still more.",
        " / ".join(f"{each * 9:.3f}/9" for each in accepted),
        "10/9, 11/9, 12/9",
        "held" if wrong < 1e-6 else "did not hold",
        ratio=accepted[1] / published[1],
    )
    return ReportSection(
        key="block_example",
        title="Accepted tokens of two, in the example of block verification's paper",
        source="Sun et al. 2024, section 2",
        columns=("verification", "ours", "published"),
        rows=[list(row) for row in zip(names, accepted, published, strict=True)],
        claims=[claim],
    )


def _below_most(generator: torch.Generator, num_models: int) -> float:
    """Return how far block verification is from the most of lossless rules, by linear programmes,
    in one round and two.
    """
    below = 0.0
    for vocab_size, num_drafted in ((2, 2), (2, 3), (3, 2)) * num_models:
        chains = Chains.random(2 * (num_drafted + 1), vocab_size, generator, sharpness=1.5)
        for rounds in (1, 2):
            block, most = (
                tokens_after(rule, chains, num_drafted, rounds)
                for rule in (BlockVerification(), None)
            )
            below = max(below, abs(most - block))
    return below


def verification_rules(
    generator: torch.Generator, num_models: int = 20, num_programmes: int = 5
) -> ReportSection:
    """Return tokens per round of the rules, enumerated, on random pairs of chains of 3 tokens, for
    3 drafted tokens.
    """
    tree_rules = MultiRound(), SpecTr()
    names = [
        *(rule.label for rule in CHAIN_RULES),
        "optimal transport",
        *(f"{rule.label}, 2 drafts" for rule in tree_rules),
    ]
    values = []
    single = []
    for _ in range(num_models):
        chains = Chains.random(4, 3, generator, sharpness=1.5)
        chained = [tokens_per_round(rule, chains, 3) for rule in CHAIN_RULES]
        sampled = [_tokens_of_samples(rule, chains, 3, 2) for rule in tree_rules]
        values.append([*chained, most_tokens_per_round(chains, 3), *sampled])
        of_token, of_block = (tokens_per_round(rule, chains, 1) for rule in CHAIN_RULES)
        single.append(abs(of_block - of_token))
    table = torch.tensor(values, dtype=torch.float64).T
    token, block, transport, multi, spectr = table
    over = table / token
    below_most = _below_most(generator, num_programmes)
    columns = zip(
        names,
        *(each.tolist() for each in (table.mean(1), over.mean(1), over.amin(1), over.amax(1))),
        strict=True,
    )
    gain = block / token - 1
    over_block = transport / block - 1
    of_spectr = spectr / multi - 1
    return ReportSection(
        key="rules",
        title=(
            f"Tokens per round by enumeration, three drafted tokens, mean of {num_models} random"
            " models"
        ),
        source="Sun et al. 2024, section 4; Sun et al. 2023, section 4; Miao et al. 2024",
        columns=("verification", "tokens", "over token", "least", "most"),
        rows=list(columns),
        claims=[
            computed(
                ("block_theorem2",),
                "No lossless rule that starts each round afresh emits more than block verification,"
                " token verification less.",
                f"equal to the best of all, by linear programmes, within {below_most:.0e}, in one"
                f" round and two; over token verification {gain.mean().item():+.1%} on average, at"
                f" least {gain.min().item():+.1%}",
                "E[tokens after i rounds] is never less, for every i",
                below_most < EXACT and gain.min().item() > -EXACT,
                why=f"{3 * num_programmes} models of 2 and 3 tokens, 2 and 3 of them drafted.",
            ),
            computed(
                ("block_theorem3", "block_greedy_more_per_round"),
                "Greedy blocks reach the optimal transport's value, so that of one block they"
                " accept no fewer tokens.",
                f"{over_block.mean().item():+.1%} over block verification on average, at least"
                f" {over_block.min().item():+.1%}",
                "sum over l of sum over x_1..l of min(t(x_1..l), d(x_1..l))",
                over_block.min().item() > -EXACT,
            ),
            equality(
                ("block_one_token",),
                "With a single drafted token block and token verification are the same.",
                max(single),
                1e-6,
            ),
        ],
        note=(
            f"SpecTr's selection emits {of_spectr.mean().item():+.1%} over multi-round"
            f" verification, at least {of_spectr.min().item():+.1%}."
        ),
    )


def accepted_error(chains: Chains, num_drafted: int, threshold: float) -> float:
    """Return the largest `(D - T) / T`, D and T the joint probabilities of what joint verification
    accepts of any draft.
    """
    _, block = every_draft(chains, num_drafted)
    accepted = JointVerification(threshold).distribution(block).survival.sum(dim=1).long()
    ratios = torch.nn.functional.pad(block.log_ratios().cumsum(dim=1), (1, 0)).gather(
        1, accepted[:, None]
    )
    return (1 / ratios.exp() - 1).max().item()


def joint_choice(generator: torch.Generator, num_models: int = 200) -> ReportSection:
    """Return the perplexity of 8 tokens of 2 that are chosen in blocks, on random chains, and the
    error of joint verification.
    """
    blocks = (1, 2, 4, 8)
    models = [Chains.random(8, 2, generator, sharpness=1.5) for _ in range(num_models)]
    nats = torch.tensor(
        [[most_likely_blocks(chains, 8, block) for block in blocks] for chains in models],
        dtype=torch.float64,
    )
    means = (-nats / 8).exp().mean(dim=0).tolist()
    better = nats - nats[:, :1]
    shares = [
        [f"{share.double().mean().item():.0%}" for share in each]
        for each in ((better > 1e-12).T, (better < -1e-12).T)
    ]
    falls = means == sorted(means, reverse=True)
    worse = bool((better < -1e-12).any())
    claim = CheckedClaim(
        ("mjsd_definition3_1", "mjsd_theorem3_2", "mjsd_corollary3_3"),
        "Choosing several tokens jointly leads to a perplexity that is no higher than choosing them"
        " singly.",
        "mean perplexity {:.3f} singly, {:.3f}, {:.3f} and {:.3f} by 2, 4 and 8".format(*means),
        None,
        "held" if falls and not worse else "held weakly" if falls else "did not hold",
        why=(
            "On average and for the whole text at once; blocks shorter than the text are higher in"
            " some models."
            if worse
            else ""
        ),
    )
    most = {
        tau: max(accepted_error(chains, 4, tau) / (1 / tau - 1) for chains in models)
        for tau in (0.1, 0.5, 0.9)
    }
    bounded = computed(
        ("mjsd_section3_2_bound",),
        "The relative error of the joint probability of what joint verification accepts is below"
        " 1/tau - 1.",
        "at most " + ", ".join(f"{share:.3f} of it at tau {tau}" for tau, share in most.items()),
        "below",
        max(most.values()) < 1,
        why="All drafts of 4 tokens were enumerated. The bound restates the rule.",
    )
    return ReportSection(
        key="joint",
        title=(
            f"Perplexity of 8 tokens by how many are chosen at a time, mean of {num_models} random"
            " models"
        ),
        source="Qin et al. 2024 (MJSD), section 3",
        columns=("tokens at a time", "perplexity", "lower than greedy", "higher"),
        rows=list(zip(blocks, means, *shares, strict=True)),
        claims=[claim, bounded],
    )
