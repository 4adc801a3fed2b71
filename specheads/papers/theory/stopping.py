"""When a draft should end, as a Markov decision process that is solved exactly, against thresholds
and the theorem.

After each drafted token the draft may go on or be verified. What is known of the tokens so far is
the probability that all of them are accepted, and the newest one's; the next one's follows from the
newest one's by a known distribution. A round earns its accepted tokens and the target's one, and
costs time. The policy with the highest throughput lambda is the one that maximises tokens minus
lambda times seconds, where that maximum is zero.

Drafts on which rules are compared are simulated: the acceptance probabilities of their tokens, each
given that all before it were accepted, (n, K) float64. Their products are `survival`. With those
known, the accepted tokens of a rule are expectations, so that only the drafts are random and every
rule is counted on the same ones.

Source: SpecDec++ (Huang et al. 2024), section 3 and theorem 3.1.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specheads.decoding.step_costs import StepCosts
from specheads.papers.claims import CheckedClaim, ReportSection, computed

# The survivals at which values are kept: evenly in their logarithm, and 0, where nothing can be
# earned.
KEPT = torch.cat(
    [
        torch.zeros(1, dtype=torch.float64),
        torch.linspace(-8.0, 0.0, 1601, dtype=torch.float64).exp(),
    ]
)
PRECISION = 1e-9  # the relative error of the throughput
THRESHOLDS = torch.arange(0.02, 1.0, 0.02, dtype=torch.float64).tolist()
RATIOS = (5, 10, 20)
LONGEST = 20


@dataclass(frozen=True)
class AcceptanceChain:
    """The distribution of acceptance probabilities along a draft, as a Markov chain on a few of
    them; float64.

    `values` (B,) are the probabilities, in ascending order, `first` (B,) is the distribution of the
    first token's and `following` (B, B) that of the next token's, by that of the token before it.
    """

    values: Tensor
    first: Tensor
    following: Tensor

    @classmethod
    def of(
        cls, values: Sequence[float], first: Sequence[float], following: Sequence[Sequence[float]]
    ) -> "AcceptanceChain":
        """Return the chain of these numbers."""
        return cls(
            *(torch.tensor(numbers, dtype=torch.float64) for numbers in (values, first, following))
        )

    def drafts(self, num: int, num_tokens: int, generator: torch.Generator) -> Tensor:
        """Return simulated drafts (num, num_tokens)."""
        bins = [torch.multinomial(self.first, num, replacement=True, generator=generator)]
        while len(bins) < num_tokens:
            bins.append(
                torch.multinomial(self.following[bins[-1]], 1, generator=generator).squeeze(1)
            )
        return self.values[torch.stack(bins, dim=1)]

    def after_one_more(self) -> Callable[[Tensor], Tensor]:
        """Return the function that reads a table (grid, B) of survivals where one more token of
        each bin leaves each survival.
        """
        earned = KEPT[:, None] * self.values
        lower = (torch.searchsorted(KEPT, earned) - 1).clamp(0, len(KEPT) - 2)
        # Values are linear in survival between a policy's changes, so they are interpolated in
        # survival, not in its logarithm.
        part = (earned - KEPT[lower]) / (KEPT[lower + 1] - KEPT[lower])
        bins = torch.arange(len(self.values)).expand_as(lower)
        return lambda table: (1 - part) * table[lower, bins] + part * table[lower + 1, bins]


# Three made-up texts: independent tokens, easy and hard stretches, easy and hard tokens in turns.
CHAINS = {
    "random": AcceptanceChain.of(
        (0.0, 0.3, 0.7, 1.0), (0.2, 0.2, 0.2, 0.4), ((0.2, 0.2, 0.2, 0.4),) * 4
    ),
    "stretches": AcceptanceChain.of(
        (0.1, 0.5, 0.98), (0.3, 0.3, 0.4), ((0.7, 0.2, 0.1), (0.2, 0.5, 0.3), (0.05, 0.15, 0.8))
    ),
    "turns": AcceptanceChain.of((0.3, 0.95), (0.5, 0.5), ((0.1, 0.9), (0.8, 0.2))),
}


class _Policy(NamedTuple):
    """The best policy: it goes on after token j of bin b while the survival so far exceeds
    `least_survival[j - 1, b]`.
    """

    throughput: float  # tokens per second
    least_survival: Tensor  # (max_tokens, B), infinite where it never goes on


def optimal_stopping(chain: AcceptanceChain, costs: StepCosts, max_tokens: int) -> _Policy:
    """Return the best policy among those that draft 1 to `max_tokens` tokens in a round."""
    low = 0.0
    high = (max_tokens + 1) / costs.target_seconds
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        worth, _ = _round_worth(chain, costs, max_tokens, middle)
        low, high = (middle, high) if worth > 0 else (low, middle)
    return _Policy(low, _round_worth(chain, costs, max_tokens, low)[1])


def _round_worth(
    chain: AcceptanceChain, costs: StepCosts, max_tokens: int, throughput: float
) -> tuple[float, Tensor]:
    """Return the most that tokens minus throughput times seconds of a round can be, and the
    policy's `least_survival`.
    """
    price = throughput * costs.draft_seconds
    after_one_more = chain.after_one_more()
    earned = KEPT[:, None] * chain.values  # what one more token of bin b brings at each survival
    best = torch.zeros(
        len(KEPT), len(chain.values), dtype=torch.float64
    )  # the best that can follow a token of bin b
    rows = [torch.full_like(chain.values, torch.inf)]
    for _ in range(max_tokens - 1):
        going_on = (
            earned + after_one_more(best)
        ) @ chain.following.T - price  # (grid, B), rises with survival
        rows.append(_crossing(going_on))
        best = going_on.clamp_min(0)
    worth = (earned + after_one_more(best))[-1]
    return float(1 - throughput * costs.target_seconds - price + chain.first @ worth), torch.stack(
        rows[::-1]
    )


def _crossing(going_on: Tensor) -> Tensor:
    """Return the survival above which going on pays, (B,); infinite where it never does."""
    pays = going_on > 0
    after = pays.long().argmax(dim=0).clamp_min(1)
    column = torch.arange(going_on.shape[1])
    above = going_on[after, column]
    below = going_on[after - 1, column]
    part = torch.where(above > below, -below / (above - below), 0.0).clamp(0, 1)
    survival = KEPT[after - 1] + part * (KEPT[after] - KEPT[after - 1])
    return torch.where(pays.any(dim=0), torch.where(pays[0], -torch.inf, survival), torch.inf)


def _value_of_going_on(chain: AcceptanceChain, policy: _Policy) -> tuple[Tensor, Tensor]:
    """Return what a policy still drafts, by token, survival and bin, (max_tokens - 1, grid, B)
    each: accepted and drafted tokens.

    Accepted tokens are expected given that all tokens so far are accepted; survival, with `KEPT`,
    is what the policy believes.
    """
    after_one_more = chain.after_one_more()
    rows = []
    accepted = drafted = torch.zeros(len(KEPT), len(chain.values), dtype=torch.float64)
    for least in policy.least_survival[1:].flip(0):
        goes_on = (KEPT[:, None] > least).double()
        later = [after_one_more(goes_on * each) for each in (accepted, drafted)]
        accepted = (chain.values * (1 + later[0])) @ chain.following.T
        drafted = (1 + later[1]) @ chain.following.T
        rows.append(torch.stack([accepted, drafted]))
    accepted, drafted = torch.stack(rows[::-1], dim=1)
    return accepted, drafted


def speed(survival: Tensor, lengths: Tensor, costs: StepCosts) -> float:
    """Return the tokens per second of rounds of these lengths (n,).

    A round emits its accepted tokens and the target's.
    """
    before_end = torch.arange(survival.shape[1]) < lengths[:, None]
    tokens = 1 + (survival * before_end).sum(dim=1)
    seconds = costs.target_seconds + costs.draft_seconds * lengths.double()
    return (tokens.sum() / seconds.sum()).item()


def lengths_at(survival: Tensor, threshold: float) -> Tensor:
    """Return the lengths (n,) of drafts that stop once some token is rejected with a probability
    above `threshold`.
    """
    return _first(1 - survival > threshold)


def lengths_of(drafts: Tensor, chain: AcceptanceChain, policy: _Policy) -> Tensor:
    """Return the lengths (n,) of drafts under the best policy for a chain."""
    bins = torch.searchsorted(chain.values, drafts)
    return _first(drafts.cumprod(dim=1) <= policy.least_survival[torch.arange(bins.shape[1]), bins])


def _first(stops: Tensor) -> Tensor:
    """Return the number of the first token (n,) after which a draft stops, (n, K).

    All tokens if it never does.
    """
    number = torch.arange(1, stops.shape[1] + 1)
    return torch.where(stops, number, stops.shape[1]).amin(dim=1)


def best_threshold(survival: Tensor, costs: StepCosts) -> float:
    """Return the threshold at which drafts are fastest."""
    return max(
        THRESHOLDS, key=lambda threshold: speed(survival, lengths_at(survival, threshold), costs)
    )


def best_fixed(survival: Tensor, costs: StepCosts) -> tuple[float, int]:
    """Return the speed of the number of tokens with which drafts are fastest, and that number."""
    num, longest = survival.shape
    return max(
        (speed(survival, torch.full((num,), count), costs), count)
        for count in range(1, longest + 1)
    )


def automatic_threshold(drafts: Tensor, costs: StepCosts) -> float:
    """Return `1 - lambda t_d / m`: where the next token earns less than its time, at the speed
    lambda that the rule achieves.

    m is the mean acceptance probability of a next token; lambda and the threshold are found in
    turns.
    """
    survival = drafts.cumprod(dim=1)
    mean = drafts.mean().item()
    threshold = 0.5
    for _ in range(20):
        threshold = (
            1 - speed(survival, lengths_at(survival, threshold), costs) * costs.draft_seconds / mean
        )
    return threshold


def theorem_delta(chain: AcceptanceChain, policy: _Policy, costs: StepCosts) -> float:
    """Return the least constant Delta of theorem 3.1 for the best policy: seconds, at least 0.

    If no token so far will be rejected, drafting on saves time. What it saves beyond the forward
    pass of the target is Delta where it saves most: accepted tokens are worth the time that a token
    takes, drafted tokens cost theirs.
    """
    accepted, drafted = _value_of_going_on(chain, policy)
    saved = accepted / policy.throughput - costs.draft_seconds * drafted
    return max(0.0, saved.max().item() - (costs.target_seconds - costs.draft_seconds))


def theorem_threshold(delta: float, costs: StepCosts) -> float:
    """Return `(c2 + Delta) / (c1 + c2 + Delta)`: at this probability of a rejection, stopping is
    better (theorem 3.1).
    """
    more = costs.target_seconds - costs.draft_seconds + delta
    return more / (costs.draft_seconds + more)


def fewest_calls(disagrees: Sequence[bool]) -> tuple[int, int]:
    """Return the fewest target calls for a greedy text, and the fewest discarded tokens with so few
    calls, over all lengths.

    `disagrees` says of each token of the text whether the draft's most likely token differs from
    the target's.
    """
    num_tokens = len(disagrees)
    best = [(0, 0)] * (num_tokens + 1)  # the best from each token on
    for start in range(num_tokens - 1, -1, -1):
        right = (
            next((end for end in range(start, num_tokens) if disagrees[end]), num_tokens) - start
        )
        options = []
        for length in range(num_tokens - start + 1):
            accepted = min(length, right)
            calls, discarded = best[min(start + accepted + 1, num_tokens)]
            options.append((calls + 1, discarded + length - accepted))
        best[start] = min(options)
    return best[0]


def thresholds(generator: torch.Generator, num_drafts: int) -> ReportSection:
    """Return how fast policies, thresholds and fixed lengths are on `num_drafts` simulated drafts
    of each made-up text.
    """
    subjects = {
        name: (chain, chain.drafts(num_drafts, LONGEST, generator))
        for name, chain in CHAINS.items()
    }
    rows: list[list[str | float]] = []
    losses: dict[str, float] = dict.fromkeys(
        subjects, 0.0
    )  # what the best threshold loses at its worst ratio
    automatic = []
    late = []
    holds = []
    for (name, (chain, drafts)), ratio in itertools.product(subjects.items(), RATIOS):
        costs = StepCosts.at_ratio(ratio)
        survival = drafts.cumprod(dim=1)
        policy = optimal_stopping(chain, costs, LONGEST)
        delta = theorem_delta(chain, policy, costs)
        chosen = (
            best_threshold(survival, costs),
            automatic_threshold(drafts, costs),
            theorem_threshold(delta, costs),
        )
        best = speed(survival, lengths_of(drafts, chain, policy), costs)
        (fixed, length) = best_fixed(survival, costs)
        speeds = [speed(survival, lengths_at(survival, each), costs) / best for each in chosen]
        holds.append(bool((policy.least_survival[:-1] >= 1 - chosen[2] - 1e-9).all()))
        losses[name] = max(losses[name], 1 - speeds[0])
        automatic.append(1 - speeds[1])
        late.append(1 - speeds[2])
        texts = [f"{value - 1:+.1%} {each:.2f}" for value, each in zip(speeds, chosen, strict=True)]
        rows.append(
            [
                name,
                ratio,
                f"{best:.3f}x",
                *texts,
                f"{delta * ratio:.1f}",
                f"{fixed / best - 1:+.1%} {length}",
            ]
        )
    worst = max(losses.values())
    most = ", ".join(f"{loss:.2%} ({name})" for name, loss in losses.items())
    return ReportSection(
        key="stopping",
        title=(
            "The best policy's speed-up, and what rules lose to it: the best threshold, the"
            " automatic, the theorem's, a length. Ratio: a target step in draft steps, as Delta"
        ),
        source="SpecDec++ (Huang et al. 2024), section 3 and theorem 3.1",
        columns=("tokens", "ratio", "best", "threshold", "automatic", "theorem", "Delta", "fixed"),
        rows=rows,
        claims=[
            computed(
                ("specdecpp_theorem3_1",),
                "Above a threshold on the probability of a rejection, stopping is better.",
                "with the Delta computed, the best policy stops where the theorem says so in"
                f" {sum(holds)} of {len(holds)} cases",
                "P(rejection) >= (c2 + Delta) / (c1 + c2 + Delta)",
                all(holds),
                why=(
                    f"As a rule the theorem's threshold stops too late: it loses {min(late):.1%} to"
                    f" {max(late):.1%}."
                ),
            ),
            CheckedClaim(
                ("specdecpp_section3_1",),
                "Choosing when to stop is a Markov decision process; a threshold is nearly as good"
                " as its best policy.",
                f"the best threshold loses at most {most}; the automatic one {max(automatic):.1%}",
                "optimal",
                "held" if worst < 0.005 else "held weakly" if worst < 0.02 else "did not hold",
            ),
        ],
    )


def greedy_oracle(num_tokens: int = 10) -> ReportSection:
    """Return the fewest target calls of greedy texts, by dynamic programming over all lengths, for
    every set of disagreements.
    """
    by_count: dict[int, list[int]] = {}
    wrong = 0
    discards = 0
    for disagrees in itertools.product((False, True), repeat=num_tokens):
        calls, discarded = fewest_calls(disagrees)
        # The call that emits a last token which differs ends the text, so there is no further call.
        wrong += calls != sum(disagrees) + 1 - disagrees[-1]
        discards += discarded
        by_count.setdefault(sum(disagrees), []).append(calls)
    claim = computed(
        ("specdecpp_lemma2_1",),
        "The best lengths discard nothing and call the target once per disagreement, plus 1.",
        f"{wrong} exceptions and {discards} discarded tokens in all {2**num_tokens:,} texts",
        "N_discarded = 0, N_target = |S| + 1",
        wrong == discards == 0,
        why="Where the last token differs, its call ends the text, and the 1 falls away.",
    )
    return ReportSection(
        key="oracle",
        title=(
            f"Fewest target calls for {num_tokens} tokens, by the number of tokens on which greedy"
            " models differ"
        ),
        source="SpecDec++ (Huang et al. 2024), lemma 2.1",
        columns=("differing tokens", "fewest calls", "most"),
        rows=[[count, min(calls), max(calls)] for count, calls in sorted(by_count.items())],
        claims=[claim],
    )
