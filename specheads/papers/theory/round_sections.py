"""Tokens per round: verification rules against the most that is possible, and the best length for independent acceptances.

Sources: Sun et al. 2024 (block verification), Sun et al. 2023 (SpecTr), Leviathan et al. 2023.
"""

import torch

from specheads.decoding import verification
from specheads.papers.block.greedy_block import GreedyBlockVerification
from specheads.papers.claims import CheckedClaim, equality
from specheads.papers.spectr.spectr import SpecTr
from specheads.papers.theory.rejections import Chains
from specheads.papers.theory.rounds import (
    best_length,
    enumerated_tokens_of_samples,
    enumerated_tokens_per_round,
    most_likely_blocks,
    most_tokens_per_round,
    tokens_per_round,
)
from specheads.papers.theory.section import Figure, Line, Section
from specheads.papers.trees.multi_round import MultiRound

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
        sampled = [enumerated_tokens_of_samples(rule, chains, 3, 2) for rule in tree_rules]
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
        lengths = [best_length(rate, ratio) for ratio in RATIOS]
        speedups = [tokens_per_round(rate, length) / (1 + length / ratio) for length, ratio in zip(lengths, RATIOS, strict=True)]
        rows.append([rate, *(f"{length}: {speedup:.2f}x" for length, speedup in zip(lengths, speedups, strict=True))])
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
