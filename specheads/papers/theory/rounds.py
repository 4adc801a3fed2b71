"""Tokens per round, by formula for independent acceptances and by enumeration of every draft for models with few tokens.

The same enumeration gives the distribution of what a decoder emits: whether a verification rule is unbiased. Sections of the
report follow: rules against the most that is possible, and the best length for independent acceptances.

Sources: Sun et al. 2024 (block verification), Sun et al. 2023 (SpecTr), Leviathan et al. 2023, Qin et al. 2024 (MJSD).
"""

import itertools
from functools import cache

import torch
from torch import Tensor

from specheads.decoding import verification
from specheads.decoding.verification.rule import Block, ChainVerification
from specheads.papers.block import GreedyBlockVerification, NestedDistribution
from specheads.papers.claims import CheckedClaim, Figure, Line, Section, equality
from specheads.papers.spectr import SpecTr
from specheads.papers.theory.rejections import Chains, rejected, residual, total_variation
from specheads.papers.trees.verification import Draft, MultiRound, TreeBlock, TreeVerification


def tokens_per_round(acceptance: float, num_drafted: int) -> float:
    """Return the expected tokens of a round, the target's included, where each drafted token is accepted independently.

    It is `(1 - a^(K+1)) / (1 - a)` (Leviathan et al. 2023, equation 1).
    """
    return sum(acceptance**count for count in range(num_drafted + 1))


def best_length(acceptance: float, cost: float, longest: int = 100) -> tuple[int, float]:
    """Return the fixed length, of 1 to `longest` tokens, with the most tokens per second, and its speed over the target alone.

    Args:
        acceptance: of each token, independently.
        cost: of a draft step, as a share of a forward pass of the target.
    """
    speeds = {count: tokens_per_round(acceptance, count) / (count * cost + 1) for count in range(1, longest + 1)}
    length = max(speeds, key=speeds.__getitem__)
    return length, speeds[length]


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


def _enumerated_tokens_of_samples(rule: TreeVerification, chains: Chains, num_drafted: int, num_drafts: int) -> float:
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
    logs, last, total = chains.target.log().tolist(), 0, 0.0
    for start in range(0, num_tokens, block):
        values = []
        for tokens in itertools.product(range(len(logs[0])), repeat=min(block, num_tokens - start)):
            steps = enumerate(zip((last, *tokens), tokens, strict=False), start)
            values.append((sum(logs[place][before][token] for place, (before, token) in steps), tokens))
        nats, tokens = max(values)
        total, last = total + nats, tokens[-1]
    return total


RATES, RATIOS = (0.5, 0.6, 0.7, 0.8, 0.9), (5, 10, 20)


def worked_example() -> Section:
    """Return the paper's example: two tokens, a target of 1/3 and 2/3, a draft of 2/3 and 1/3, two drafted tokens."""
    target, draft = (torch.tensor(each).double().expand(3, 2, 2) for each in ((1 / 3, 2 / 3), (2 / 3, 1 / 3)))
    chains, published = Chains(target, draft), (10 / 9, 11 / 9, 12 / 9)
    rules = verification.TokenVerification(), verification.BlockVerification(), GreedyBlockVerification()
    accepted = [enumerated_tokens_per_round(rule, chains, 2) - 1 for rule in rules]
    wrong = max(abs(ours - theirs) for ours, theirs in zip(accepted, published, strict=True))
    return Section(
        key="block_example",
        title="Accepted tokens of two, in the example of block verification's paper",
        source="Sun et al. 2024, section 2",
        columns=("verification", "ours", "published"),
        rows=[[rule.label, ours, theirs] for rule, ours, theirs in zip(rules, accepted, published, strict=True)],
        claims=[
            CheckedClaim(
                ("block_lemma1",),
                "In the example block verification accepts more than token verification, and an ideal rule still more.",
                " / ".join(f"{each * 9:.3f}/9" for each in accepted),
                "10/9, 11/9, 12/9",
                "held" if wrong < 1e-6 else "did not hold",
                ratio=accepted[1] / published[1],
            )
        ],
    )


def verification_rules(generator: torch.Generator, num_models: int = 20) -> Section:
    """Return tokens per round of the rules, enumerated, on random pairs of chains of 3 tokens, for 3 drafted tokens."""
    chain_rules = verification.TokenVerification(), verification.BlockVerification(), GreedyBlockVerification()
    tree_rules = MultiRound(), SpecTr()
    names = [*(rule.label for rule in chain_rules), "optimal transport", *(f"{rule.label}, 2 drafts" for rule in tree_rules)]
    values, single = [], []
    for _ in range(num_models):
        chains = Chains.random(4, 3, generator, sharpness=1.5)
        chained = [enumerated_tokens_per_round(rule, chains, 3) for rule in chain_rules]
        sampled = [_enumerated_tokens_of_samples(rule, chains, 3, 2) for rule in tree_rules]
        values.append([*chained, most_tokens_per_round(chains, 3), *sampled])
        of_token, of_block = (enumerated_tokens_per_round(rule, chains, 1) for rule in chain_rules[:2])
        single.append(abs(of_block - of_token))
    table = torch.tensor(values, dtype=torch.float64).T
    token, block, greedy, transport, multi, spectr = table
    rows = [
        [name, tokens.mean().item(), (tokens / token).mean().item(), (tokens / token).min().item(), (tokens / token).max().item()]
        for name, tokens in zip(names, table, strict=True)
    ]
    gain, of_spectr = block / token - 1, spectr / multi - 1
    return Section(
        key="rules",
        title=f"Tokens per round by enumeration, three drafted tokens, mean of {num_models} random models",
        source="Sun et al. 2024, section 4; Sun et al. 2023, section 4; Miao et al. 2024",
        columns=("verification", "tokens", "over token", "least", "most"),
        rows=rows,
        claims=[
            CheckedClaim(
                ("block_theorem2",),
                "Block verification never accepts fewer tokens than token verification.",
                f"{gain.mean().item():+.1%} on average, at least {gain.min().item():+.1%}, in {num_models} models",
                "never less",
                "held" if gain.min().item() > -1e-9 else "did not hold",
                why="That no other rule emits more over all rounds is not enumerated.",
            ),
            equality(
                ("block_greedy_more_per_round",),
                "Greedy block verification accepts as many tokens of a single block as any rule: the optimal transport's value.",
                (greedy - transport).abs().max().item(),
                1e-6,
            ),
            equality(
                ("block_one_token",), "With a single drafted token block and token verification are the same.", max(single), 1e-6
            ),
        ],
        note=f"SpecTr's selection emits {of_spectr.mean().item():+.1%} over multi-round verification, at least "
        f"{of_spectr.min().item():+.1%}.",
    )


def joint_choice(generator: torch.Generator, num_models: int = 200) -> Section:
    """Return the perplexity of 8 tokens of 2 that are chosen in blocks, each the most likely of all, on random chains."""
    blocks = (1, 2, 4, 8)
    models = [Chains.random(8, 2, generator, sharpness=1.5) for _ in range(num_models)]
    nats = torch.tensor([[most_likely_blocks(chains, 8, block) for block in blocks] for chains in models], dtype=torch.float64)
    perplexity, better = (-nats / 8).exp(), nats - nats[:, :1]
    rows = [
        [block, of.mean().item(), f"{(more > 1e-12).double().mean().item():.0%}", f"{(more < -1e-12).double().mean().item():.0%}"]
        for block, of, more in zip(blocks, perplexity.T, better.T, strict=True)
    ]
    means = perplexity.mean(dim=0).tolist()
    falls, worse = means == sorted(means, reverse=True), bool((better < -1e-12).any())
    return Section(
        key="joint",
        title=f"Perplexity of 8 tokens by how many are chosen at a time, mean of {num_models} random models",
        source="Qin et al. 2024 (MJSD), section 3",
        columns=("tokens at a time", "perplexity", "lower than greedy", "higher"),
        rows=rows,
        claims=[
            CheckedClaim(
                ("mjsd_theorem3_2", "mjsd_corollary3_3"),
                "Choosing several tokens jointly leads to a perplexity that is no higher than choosing them singly.",
                f"mean perplexity {means[0]:.3f} singly, {means[1]:.3f}, {means[2]:.3f} and {means[3]:.3f} by 2, 4 and 8",
                None,
                "held" if falls and not worse else "held weakly" if falls else "did not hold",
                why="On average and for the whole text at once; blocks shorter than the text are higher in some models."
                if worse
                else "",
            )
        ],
    )


def independent_acceptance() -> Section:
    """Return the best fixed length and its speed-up where every token is accepted independently."""
    rows: list[list[float | str]] = []
    for rate in RATES:
        rows.append([rate, *("{}: {:.2f}x".format(*best_length(rate, 1 / ratio)) for ratio in RATIOS)])
    curves = [
        Line(f"acceptance {rate}", list(range(21)), [tokens_per_round(rate, count) / (1 + count / 10) for count in range(21)])
        for rate in RATES
    ]
    return Section(
        key="independent",
        title="Best number of drafted tokens and its speed-up, by acceptance rate and the cost of a target step in draft steps",
        source="Leviathan et al. 2023, equation 1 and theorem 3.8",
        columns=("acceptance", *(f"ratio {ratio}" for ratio in RATIOS)),
        rows=rows,
        claims=[],
        figure=Figure("drafted tokens", "speed-up at ratio 10", curves),
    )
