"""When to stop drafting: the best policy, solved, against thresholds and the theorem.

Source: SpecDec++ (Huang et al. 2024), section 3.
"""

import itertools
from collections.abc import Mapping

import torch

from specheads.decoding.step_costs import StepCosts
from specheads.papers.claims import CheckedClaim, Figure, Line, Section
from specheads.papers.theory.stopping import (
    THRESHOLDS,
    AcceptanceChain,
    Drafts,
    automatic_threshold,
    best_fixed,
    best_threshold,
    fewest_calls,
    lengths_at,
    lengths_of,
    optimal_stopping,
    speed,
    theorem_delta,
    theorem_threshold,
)

RATIOS, LONGEST = (5, 10, 20), 20
# Acceptance probabilities of tokens in three made-up texts: independent ones, easy and hard stretches, easy and hard in turns.
CHAINS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...], tuple[tuple[float, ...], ...]]] = {
    "random": ((0.0, 0.3, 0.7, 1.0), (0.2, 0.2, 0.2, 0.4), ((0.2, 0.2, 0.2, 0.4),) * 4),
    "stretches": ((0.1, 0.5, 0.98), (0.3, 0.3, 0.4), ((0.7, 0.2, 0.1), (0.2, 0.5, 0.3), (0.05, 0.15, 0.8))),
    "turns": ((0.3, 0.95), (0.5, 0.5), ((0.1, 0.9), (0.8, 0.2))),
}


def known_chains() -> dict[str, AcceptanceChain]:
    """Return the three distributions of acceptance."""
    chains = {}
    for name, (values, first, following) in CHAINS.items():
        each = torch.tensor(values, dtype=torch.float64)
        probabilities = [torch.tensor(rows, dtype=torch.float64) for rows in (first, following)]
        chains[name] = AcceptanceChain((each[1:] + each[:-1]) / 2, each, *probabilities)
    return chains


def thresholds(generator: torch.Generator, num_drafts: int, recorded: Mapping[str, Drafts] | None = None) -> Section:
    """Return how fast the best policy, the best threshold, the automatic one, the theorem's and the best fixed length are.

    Args:
        num_drafts: to simulate for each of the three distributions.
        recorded: by name, drafts of a pair with their true acceptance probabilities; chains are fitted to them.
    """
    subjects = {name: (chain, Drafts.simulated(chain, num_drafts, LONGEST, generator)) for name, chain in known_chains().items()}
    subjects |= {name: (drafts.chain(), drafts) for name, drafts in (recorded or {}).items()}
    rows: list[list[str | float]] = []
    losses: dict[str, list[float]] = {name: [] for name in subjects}
    automatic, late, holds = [], [], []
    for name, (chain, drafts) in subjects.items():
        for ratio in RATIOS:
            costs = StepCosts.at_ratio(ratio)
            policy = optimal_stopping(chain, costs, drafts.acceptance.shape[1])
            delta = theorem_delta(chain, policy, costs)
            chosen = best_threshold(drafts, costs), automatic_threshold(drafts, costs), theorem_threshold(delta, costs)
            best = speed(drafts, lengths_of(drafts, chain, policy), costs)
            speeds = [speed(drafts, lengths_at(drafts, each), costs).value / best.value for each in chosen]
            fixed = best_fixed(drafts, costs)
            at_fixed = speed(drafts, torch.full((len(drafts.acceptance),), fixed), costs).value / best.value
            holds.append(bool((policy.least_survival[:-1] >= 1 - chosen[2] - 1e-9).all()))
            losses[name].append(1 - speeds[0])
            automatic.append(1 - speeds[1])
            late.append(1 - speeds[2])
            texts = [f"{value - 1:+.1%} {each:.2f}" for value, each in zip(speeds, chosen, strict=True)]
            rows.append([name, ratio, f"{best.value:.3f}x", *texts, f"{delta * ratio:.1f}", f"{at_fixed - 1:+.1%} {fixed}"])
    worst = max(max(each) for each in losses.values())
    most = ", ".join(f"{max(each):.2%} ({name})" for name, each in losses.items())
    return Section(
        key="stopping",
        title="The best policy's speed-up, and what rules lose to it: the best threshold, the automatic, the theorem's, a length."
        " Ratio: a target step in draft steps, as Delta",
        source="SpecDec++ (Huang et al. 2024), section 3 and theorem 3.1",
        columns=("tokens", "ratio", "best", "threshold", "automatic", "theorem", "Delta", "fixed"),
        rows=rows,
        claims=[
            CheckedClaim(
                ("specdecpp_theorem3_1",),
                "Above a threshold on the probability of a rejection, stopping is better.",
                f"with the Delta computed, the best policy stops where the theorem says so in {sum(holds)} of {len(holds)} cases",
                "P(rejection) >= (c2 + Delta) / (c1 + c2 + Delta)",
                "held" if all(holds) else "did not hold",
                why=f"As a rule the theorem's threshold stops too late: it loses {min(late):.1%} to {max(late):.1%}.",
            ),
            CheckedClaim(
                ("specdecpp_section3_1",),
                "Choosing when to stop is a Markov decision process; a threshold is nearly as good as its best policy.",
                f"the best threshold loses at most {most}; the automatic one {max(automatic):.1%}",
                "optimal",
                "held" if worst < 0.005 else "held weakly" if worst < 0.02 else "did not hold",
            ),
        ],
        figure=_figure(subjects),
    )


def _figure(subjects: Mapping[str, tuple[AcceptanceChain, Drafts]]) -> Figure:
    """Return the speed-up by threshold at ratio 10."""
    costs, levels = StepCosts.at_ratio(10), THRESHOLDS.tolist()
    lines = [
        Line(name, levels, [speed(drafts, lengths_at(drafts, level), costs).value for level in levels])
        for name, (_, drafts) in subjects.items()
    ]
    return Figure("threshold on the probability of a rejection", "speed-up at ratio 10", lines)


def greedy_oracle(num_tokens: int = 10) -> Section:
    """Return the fewest target calls of greedy texts, by dynamic programming over all lengths, for every set of disagreements."""
    by_count: dict[int, list[int]] = {}
    wrong, discards = 0, 0
    for disagrees in itertools.product((False, True), repeat=num_tokens):
        calls, discarded = fewest_calls(disagrees)
        # The call that emits a last token which differs ends the text, so there is no further call.
        wrong += calls != sum(disagrees) + 1 - disagrees[-1]
        discards += discarded
        by_count.setdefault(sum(disagrees), []).append(calls)
    rows = [[count, min(calls), max(calls)] for count, calls in sorted(by_count.items())]
    return Section(
        key="oracle",
        title=f"Fewest target calls for {num_tokens} tokens, by the number of tokens on which greedy models differ",
        source="SpecDec++ (Huang et al. 2024), lemma 2.1",
        columns=("differing tokens", "fewest calls", "most"),
        rows=rows,
        claims=[
            CheckedClaim(
                ("specdecpp_lemma2_1",),
                "The best lengths discard nothing and call the target once per disagreement, plus 1.",
                f"{wrong} exceptions and {discards} discarded tokens in all {2**num_tokens:,} texts",
                "N_discarded = 0, N_target = |S| + 1",
                "held" if wrong == discards == 0 else "did not hold",
                why="Where the last token differs, its call ends the text, and the 1 falls away.",
            )
        ],
    )
