"""When a draft should end, as a Markov decision process that is solved exactly, against thresholds
and the theorem.

After each drafted token the draft may go on or be verified. What is known of the tokens so far is
the probability that all of them are accepted (`survival`), and the newest one's; the next one's
follows from the newest one's by a known distribution. A round earns its accepted tokens and the
target's one, and costs time. The policy with the highest throughput lambda is the one that
maximises tokens minus lambda times seconds, where that maximum is zero.

Drafts on which rules are compared are simulated: the acceptance probabilities of their tokens, each
given that all before it were accepted, (n, K) float64. With those known, the accepted tokens of a
rule are expectations, so that only the drafts are random and every rule is counted on the same
ones.

Source: SpecDec++ (Huang et al. 2024), section 3 and theorem 3.1.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor

from benchmarks.papers.measures import Answer
from specheads.decoding.step_costs import StepCosts

# The survivals at which values are kept: evenly in their logarithm, and 0, where nothing can be
# earned.
KEPT = torch.cat(
    [torch.zeros(1).double(), torch.linspace(-8.0, 0.0, 1601, dtype=torch.float64).exp()]
)
PRECISION = 1e-9  # the relative error of the throughput
THRESHOLDS = torch.arange(0.02, 1.0, 0.02, dtype=torch.float64).tolist()
RATIOS = (5, 10, 20)
LONGEST = 20
NUM_DRAFTS = 20_000


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
            *(torch.tensor(each, dtype=torch.float64) for each in (values, first, following))
        )

    def drafts(self, num: int, num_tokens: int, generator: Generator) -> Tensor:
        """Return simulated drafts (num, num_tokens)."""
        bins = [torch.multinomial(self.first, num, replacement=True, generator=generator)]
        while len(bins) < num_tokens:
            rows = self.following[bins[-1]]
            bins.append(torch.multinomial(rows, 1, generator=generator).squeeze(1))
        return self.values[torch.stack(bins, dim=1)]

    @cached_property
    def earned(self) -> Tensor:
        """The survival (grid, B) after one more token of each bin: what that token earns."""
        return KEPT[:, None] * self.values

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Where one more token leads, (grid, B) each: the place before it in `KEPT`, and the part
        of the way to the next place.
        """
        lower = (torch.searchsorted(KEPT, self.earned) - 1).clamp(0, len(KEPT) - 2)
        return lower, (self.earned - KEPT[lower]) / (KEPT[lower + 1] - KEPT[lower])

    def after_one_more(self, table: Tensor) -> Tensor:
        """Return a table (grid, B) of survivals, read where one more token of each bin leads.

        Values are linear in survival between a policy's changes, so they are interpolated.
        """
        lower, part = self.places
        bins = torch.arange(len(self.values)).expand_as(lower)
        return (1 - part) * table[lower, bins] + part * table[lower + 1, bins]


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


@dataclass(frozen=True)
class Policy:
    """The best policy: it goes on after token j of bin b while the survival so far exceeds
    `least_survival[j - 1, b]`.
    """

    throughput: float  # tokens per second
    least_survival: Tensor  # (max_tokens, B), infinite where it never goes on

    def lengths(self, drafts: Tensor, chain: AcceptanceChain) -> Tensor:
        """Return how many tokens of each draft (n, K) it drafts, (n,)."""
        bins = torch.searchsorted(chain.values, drafts)
        least = self.least_survival[torch.arange(bins.shape[1]), bins]
        return first_stop(drafts.cumprod(dim=1) <= least)


def optimal_stopping(chain: AcceptanceChain, costs: StepCosts, max_tokens: int) -> Policy:
    """Return the best policy among those that draft 1 to `max_tokens` tokens in a round."""
    low = 0.0
    high = (max_tokens + 1) / costs.target_seconds
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        worth, _ = _round_worth(chain, costs, max_tokens, middle)
        if worth > 0:
            low = middle
        else:
            high = middle
    _, least_survival = _round_worth(chain, costs, max_tokens, low)
    return Policy(low, least_survival)


def _round_worth(
    chain: AcceptanceChain, costs: StepCosts, max_tokens: int, throughput: float
) -> tuple[float, Tensor]:
    """Return the most that tokens minus throughput times seconds of a round can be, and the
    policy's `least_survival`.
    """
    price = throughput * costs.draft_seconds
    earned = chain.earned
    best = torch.zeros_like(earned)  # the best that can follow a token of each bin
    rows = [torch.full_like(chain.values, torch.inf)]
    for _ in range(max_tokens - 1):
        # It rises with survival.
        going_on = (earned + chain.after_one_more(best)) @ chain.following.T - price
        rows.append(_crossing(going_on))
        best = going_on.clamp_min(0)
    of_draft = float(chain.first @ (earned + chain.after_one_more(best))[-1])
    worth = 1 + of_draft - throughput * costs.target_seconds - price
    return worth, torch.stack(rows[::-1])


def _crossing(going_on: Tensor) -> Tensor:
    """Return the survival above which going on pays, (B,); infinite where it never does."""
    pays = going_on > 0
    after = pays.long().argmax(dim=0).clamp_min(1)
    column = torch.arange(going_on.shape[1])
    above = going_on[after, column]
    below = going_on[after - 1, column]
    part = torch.where(above > below, -below / (above - below), 0.0).clamp(0, 1)
    survival = KEPT[after - 1] + part * (KEPT[after] - KEPT[after - 1])
    survival = torch.where(pays[0], -torch.inf, survival)
    return torch.where(pays.any(dim=0), survival, torch.inf)


def theorem_delta(chain: AcceptanceChain, policy: Policy, costs: StepCosts) -> float:
    """Return the least constant Delta of theorem 3.1 for the best policy: seconds, at least 0.

    If no token so far will be rejected, drafting on saves time. What it saves beyond the forward
    pass of the target is Delta where it saves most: accepted tokens are worth the time that a token
    takes, drafted tokens cost theirs.
    """
    # What the policy still drafts after a token, by survival and bin (grid, B). Accepted tokens are
    # expected given that all tokens so far are accepted; survival is what the policy believes.
    accepted = torch.zeros(len(KEPT), len(chain.values), dtype=torch.float64)
    drafted = accepted
    most = 0.0
    for least in policy.least_survival[1:].flip(0):
        goes_on = (KEPT[:, None] > least).double()
        later_accepted = chain.after_one_more(goes_on * accepted)
        later_drafted = chain.after_one_more(goes_on * drafted)
        accepted = (chain.values * (1 + later_accepted)) @ chain.following.T
        drafted = (1 + later_drafted) @ chain.following.T
        saved = accepted / policy.throughput - costs.draft_seconds * drafted
        most = max(most, saved.max().item() - (costs.target_seconds - costs.draft_seconds))
    return most


def theorem_threshold(delta: float, costs: StepCosts) -> float:
    """Return `(c2 + Delta) / (c1 + c2 + Delta)`: at this probability of a rejection, stopping is
    better (theorem 3.1).
    """
    more = costs.target_seconds - costs.draft_seconds + delta
    return more / (costs.draft_seconds + more)


def first_stop(stops: Tensor) -> Tensor:
    """Return the number of the first token (n,) after which a draft stops, (n, K); K if none."""
    number = torch.arange(1, stops.shape[1] + 1)
    return torch.where(stops, number, stops.shape[1]).amin(dim=1)


def speed(survival: Tensor, lengths: Tensor, costs: StepCosts) -> float:
    """Return the tokens per second of rounds of these lengths (n,)."""
    before_end = torch.arange(survival.shape[1]) < lengths[:, None]
    tokens = 1 + (survival * before_end).sum(dim=1)
    seconds = costs.target_seconds + costs.draft_seconds * lengths.double()
    return (tokens.sum() / seconds.sum()).item()


def speed_at(survival: Tensor, threshold: float, costs: StepCosts) -> float:
    """Return the speed where drafts stop once some token is rejected with a probability above
    `threshold`.
    """
    return speed(survival, first_stop(1 - survival > threshold), costs)


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
        threshold = 1 - speed_at(survival, threshold, costs) * costs.draft_seconds / mean
    return threshold


def fewest_calls(disagrees: Sequence[bool]) -> tuple[int, int]:
    """Return the fewest target calls for a greedy text, and the fewest discarded tokens with so few
    calls, over all lengths.

    `disagrees` says of each token of the text whether the draft's most likely token differs from
    the target's.
    """
    num_tokens = len(disagrees)
    best = [(0, 0)] * (num_tokens + 1)  # the best from each token on
    right = 0  # tokens from here on that the draft has right
    for start in range(num_tokens - 1, -1, -1):
        right = 0 if disagrees[start] else right + 1
        options = []
        for length in range(num_tokens - start + 1):
            accepted = min(length, right)
            calls, discarded = best[min(start + accepted + 1, num_tokens)]
            options.append((calls + 1, discarded + length - accepted))
        best[start] = min(options)
    return best[0]


def thresholds(generator: Generator) -> list[Answer]:
    """Return the claims on thresholds, on simulated drafts of each made-up text."""
    simulated = {
        name: chain.drafts(NUM_DRAFTS, LONGEST, generator) for name, chain in CHAINS.items()
    }
    losses = dict.fromkeys(CHAINS, 0.0)  # what the best threshold loses at its worst ratio
    of_automatic = []
    of_theorem = []
    holds = []
    for (name, chain), ratio in itertools.product(CHAINS.items(), RATIOS):
        costs = StepCosts.at_ratio(ratio)
        drafts = simulated[name]
        survival = drafts.cumprod(dim=1)
        policy = optimal_stopping(chain, costs, LONGEST)
        threshold = theorem_threshold(theorem_delta(chain, policy, costs), costs)
        best = speed(survival, policy.lengths(drafts, chain), costs)
        best_threshold = max(speed_at(survival, each, costs) for each in THRESHOLDS)
        automatic = speed_at(survival, automatic_threshold(drafts, costs), costs)
        losses[name] = max(losses[name], 1 - best_threshold / best)
        of_automatic.append(1 - automatic / best)
        of_theorem.append(1 - speed_at(survival, threshold, costs) / best)
        holds.append(bool((policy.least_survival[:-1] >= 1 - threshold - 1e-9).all()))
    worst = max(losses.values())
    nearly = None if 0.005 <= worst < 0.02 else worst < 0.005  # None: held weakly
    most = ", ".join(f"{loss:.2%} ({name})" for name, loss in losses.items())
    return [
        Answer(
            "theorem_threshold",
            "with the Delta computed, the best policy stops where the theorem stops in"
            f" {sum(holds)} of {len(holds)} cases",
            all(holds),
            f"As a rule the theorem's threshold stops too late: it loses {min(of_theorem):.1%} to"
            f" {max(of_theorem):.1%}.",
        ),
        Answer(
            "best_threshold",
            f"the best threshold loses at most {most}; the automatic one {max(of_automatic):.1%}",
            nearly,
        ),
    ]


def greedy_oracle(generator: Generator) -> list[Answer]:
    """Return the claim on the fewest target calls of greedy texts, for every set of
    disagreements in 10 tokens.
    """
    wrong = 0
    discards = 0
    for disagrees in itertools.product((False, True), repeat=10):
        calls, discarded = fewest_calls(disagrees)
        # The call that emits a last token which differs ends the text, so there is no further call.
        wrong += calls != sum(disagrees) + 1 - disagrees[-1]
        discards += discarded
    ours = f"{wrong} exceptions and {discards} discarded tokens in all 1,024 texts"
    return [Answer("oracle", ours, wrong == discards == 0)]
