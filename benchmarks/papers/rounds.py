"""Tokens per round of the verification rules by enumeration, against the most that is possible, and
blocks chosen jointly.

Sources: Sun et al. 2024 (block verification), Sun et al. 2023 (SpecTr), Qin et al. 2024 (MJSD).
"""

import itertools

import torch
from sympy import Matrix, Rational  # installed with torch
from sympy.solvers.simplex import linprog
from torch import Generator, Tensor

from benchmarks.papers.chains import Chains, every_draft, tokens_per_round
from benchmarks.papers.measures import Answer, equal
from benchmarks.papers.rejections import EXACT
from specheads.decoding.verification import BlockVerification, TokenVerification, VerificationRule
from specheads.papers import JointVerification

NUM_PROGRAMMES = 5  # models of each size whose linear programmes are solved
NUM_JOINT = 200  # models whose blocks are chosen


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


def largest(objective: Tensor, rows: Tensor, limits: Tensor) -> float:
    """Return the largest `objective @ x` of x >= 0 with `rows @ x <= limits`, by the simplex method
    in exact fractions.
    """

    costs = [Rational(each) for each in (-objective).tolist()]
    bounds = [Rational(each) for each in limits.tolist()]
    entries = [Rational(each) for each in rows.flatten().tolist()]
    least, _ = linprog(costs, Matrix(*rows.shape, entries), bounds)
    return -float(least)


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
    _, target = block.drafted_probs()
    vocab_size = chains.target.shape[-1]
    count = len(probability)
    place = torch.eye(num_drafted + 1).double()
    drafts = torch.eye(count).double()
    rows = [torch.kron(drafts, place - place.roll(1, dims=0).tril())]  # a_0 <= 1, a_i <= a_{i-1}
    for kept in range(num_drafted):
        # Of the drafts that begin with s y, and of those that begin with s.
        longer = drafts.view(vocab_size ** (kept + 1), -1, count).sum(dim=1) * probability
        shorter = longer.view(-1, vocab_size, count).sum(dim=1).repeat_interleave(vocab_size, dim=0)
        following = target[:, kept].view(len(longer), -1)[:, :1]
        kept_longer = torch.kron(longer, place[[kept + 1]])
        rows.append(kept_longer - torch.kron(following * shorter, place[[kept]]))
    objective = torch.nn.functional.pad(gains * probability[:, None], (1, 0)).flatten()
    limits = torch.zeros(sum(map(len, rows))).double()
    limits[: len(objective) : num_drafted + 1] = 1
    return largest(objective, torch.cat(rows), limits)


def tokens_after(
    rule: VerificationRule | None, chains: Chains, num_drafted: int, rounds: int
) -> float:
    """Return the expected tokens after some rounds under a lossless rule.

    None: the most of all that start each round afresh.
    """
    if not rounds:
        return 0.0
    probability, block = every_draft(chains, num_drafted)
    # By length and last token of what the round emits.
    ends = torch.zeros(num_drafted + 1, chains.target.shape[-1]).double()
    for place, token in itertools.product(*map(range, ends.shape)):
        later = chains.after(place + 1, token)
        ends[place, token] = place + 1 + tokens_after(rule, later, num_drafted, rounds - 1)
    sampled = (block.target_probs * ends).sum(dim=-1)  # the target's token ends it after i tokens
    of_drafted = ends[:-1].expand(len(probability), -1, -1)
    of_drafted = of_drafted.gather(2, block.tokens[..., None]).squeeze(2)
    gains = sampled[:, 1:] - of_drafted
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
        best = -torch.inf
        chosen = last
        size = min(block, num_tokens - start)
        for tokens in itertools.product(range(len(logs[0])), repeat=size):
            nats = 0.0
            before = last
            for place, token in enumerate(tokens, start):
                nats += logs[place][before][token]
                before = token
            if nats > best:
                best = nats
                chosen = before
        total += best
        last = chosen
    return total


def accepted_error(chains: Chains, num_drafted: int, threshold: float) -> float:
    """Return the largest `(D - T) / T`, D and T the joint probabilities of what joint verification
    accepts of any draft.
    """
    _, block = every_draft(chains, num_drafted)
    accepted = JointVerification(threshold).distribution(block).survival.sum(dim=1).long()
    ratios = torch.nn.functional.pad(block.log_ratios().cumsum(dim=1), (1, 0))
    return (1 / ratios.gather(1, accepted[:, None]).exp() - 1).max().item()


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


def _below_most(generator: Generator) -> float:
    """Return how far block verification is from the most of lossless rules, by linear programmes,
    in one round and two.
    """
    below = 0.0
    for vocab_size, num_drafted in ((2, 2), (2, 3), (3, 2)) * NUM_PROGRAMMES:
        chains = Chains.random(2 * (num_drafted + 1), vocab_size, generator, sharpness=1.5)
        for rounds in (1, 2):
            block = tokens_after(BlockVerification(), chains, num_drafted, rounds)
            most = tokens_after(None, chains, num_drafted, rounds)
            below = max(below, abs(most - block))
    return below


def verification_rules(generator: Generator) -> list[Answer]:
    """Return the claims on tokens per round, on 20 random pairs of chains of 3 tokens, for 3
    drafted tokens.
    """
    values = []
    single = []
    for _ in range(20):
        chains = Chains.random(4, 3, generator, sharpness=1.5)
        token = tokens_per_round(TokenVerification(), chains, 3)
        block = tokens_per_round(BlockVerification(), chains, 3)
        values.append([token, block, most_tokens_per_round(chains, 3)])
        of_token = tokens_per_round(TokenVerification(), chains, 1)
        single.append(abs(tokens_per_round(BlockVerification(), chains, 1) - of_token))
    token, block, transport = torch.tensor(values, dtype=torch.float64).T
    below_most = _below_most(generator)
    gain = block / token - 1
    over_block = transport / block - 1
    return [
        Answer(
            "most_by_block",
            f"equal to the best of all, by linear programmes, within {below_most:.0e}, in one"
            f" round and two; over token verification {gain.mean().item():+.1%} on average, at"
            f" least {gain.min().item():+.1%}",
            below_most < EXACT and gain.min().item() > -EXACT,
        ),
        Answer(
            "optimal_transport",
            f"{over_block.mean().item():+.1%} over block verification on average, at least"
            f" {over_block.min().item():+.1%}",
            over_block.min().item() > -EXACT,
        ),
        equal("one_token", max(single)),
    ]


def joint_choice(generator: Generator) -> list[Answer]:
    """Return the claims on the perplexity of 8 tokens of 2 that are chosen in blocks, on random
    chains, and on the error of joint verification.
    """
    models = []
    rows = []
    for _ in range(NUM_JOINT):
        chains = Chains.random(8, 2, generator, sharpness=1.5)
        models.append(chains)
        rows.append([most_likely_blocks(chains, 8, block) for block in (1, 2, 4, 8)])
    nats = torch.tensor(rows, dtype=torch.float64)
    means = (-nats / 8).exp().mean(dim=0).tolist()
    falls = means == sorted(means, reverse=True)
    worse = bool((nats - nats[:, :1] < -1e-12).any())
    ours = "mean perplexity {:.3f} singly, {:.3f}, {:.3f} and {:.3f} by 2, 4 and 8".format(*means)
    choice = Answer("joint_choice", ours, falls)
    if falls and worse:
        why = "On average and for the whole text at once; blocks shorter than the text are higher"
        choice = Answer("joint_choice", ours, None, f"{why} in some models.")
    shares = {}  # of the bound, by threshold
    for threshold in (0.1, 0.5, 0.9):
        most = max(accepted_error(chains, 4, threshold) for chains in models)
        shares[threshold] = most / (1 / threshold - 1)
    listed = ", ".join(f"{share:.3f} of it at tau {tau}" for tau, share in shares.items())
    return [choice, Answer("joint_error", f"at most {listed}", max(shares.values()) < 1)]
