"""When a draft should end, as a Markov decision process that is solved exactly (SpecDec++, section 3.1).

After each drafted token the draft may go on or be verified. What is known of the tokens so far is the probability that all of
them are accepted, and the newest one's; the next one's follows from the newest one's by a known law. A round earns its accepted
tokens and the target's one, and costs time. The policy with the highest throughput lambda is the one that maximises tokens minus
lambda times seconds, where that maximum is zero.

Drafts on which rules that stop at a threshold are counted against that policy are simulated or recorded: the acceptance
probabilities of their tokens, each given that all before it were accepted. With those known, the accepted tokens of a rule are
expectations, so that only the drafts are random and every rule is counted on the same ones.

Source: SpecDec++ (Huang et al. 2024), section 3.1 and theorem 3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specheads.decoding.step_costs import StepCosts

GRID = torch.linspace(-8.0, 0.0, 161, dtype=torch.float64)  # logarithms of survival at which values are kept
PRECISION = 1e-9  # of the throughput, relative


@dataclass(frozen=True)
class AcceptanceChain:
    """The law of acceptance probabilities along a draft, as a Markov chain on bins of them; float64.

    `edges` (B - 1,) separate the bins, `values` (B,) are their mean probabilities, `first` (B,) is the law of the first token's
    bin and `following` (B, B) that of the next token's bin, by the bin of the token before it.
    """

    edges: Tensor
    values: Tensor
    first: Tensor
    following: Tensor

    @classmethod
    def of(cls, first: Tensor, before: Tensor, after: Tensor, num_bins: int = 20) -> "AcceptanceChain":
        """Return the chain of observed probabilities: of first tokens (n,), and of tokens and their next ones, (m,) each."""
        everything = torch.cat([first, after]).double()
        edges = torch.quantile(
            everything[:: max(1, len(everything) // 100_000)], torch.linspace(0, 1, num_bins + 1).double()[1:-1]
        )
        edges = edges.unique()
        count = len(edges) + 1
        totals = torch.zeros(count, dtype=torch.float64).index_add_(0, torch.bucketize(everything, edges), everything)
        number = torch.bincount(torch.bucketize(everything, edges), minlength=count)
        pairs = torch.bucketize(before.double(), edges) * count + torch.bucketize(after.double(), edges)
        following = torch.bincount(pairs, minlength=count * count).double().view(count, count) + 1e-6
        start = torch.bincount(torch.bucketize(first.double().contiguous(), edges), minlength=count).double()
        return cls(edges, totals / number.clamp_min(1), start / start.sum(), following / following.sum(dim=1, keepdim=True))


@dataclass(frozen=True)
class _OptimalStopping:
    """The best policy: it goes on after token j, which is in bin b, where the survival so far exceeds `least_survival[j - 1, b]`.

    `throughput` is its tokens per second; `least_survival` is (max_tokens, B), infinite where it never goes on.
    """

    throughput: float
    least_survival: Tensor


def optimal_stopping(chain: AcceptanceChain, costs: StepCosts, max_tokens: int) -> _OptimalStopping:
    """Return the best policy among those that draft 1 to `max_tokens` tokens in a round."""
    low, high = 0.0, (max_tokens + 1) / costs.target_seconds
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        worth, _ = _round_worth(chain, costs, max_tokens, middle)
        low, high = (middle, high) if worth > 0 else (low, middle)
    return _OptimalStopping(low, _round_worth(chain, costs, max_tokens, low)[1])


def _round_worth(chain: AcceptanceChain, costs: StepCosts, max_tokens: int, throughput: float) -> tuple[float, Tensor]:
    """Return the most that tokens minus throughput times seconds of a round can be, and the policy's `least_survival`."""
    price, survival = throughput * costs.draft_seconds, GRID.exp()
    # What one more token of bin b earns at each survival.
    earned = survival[:, None] * chain.values
    lower, part, bins = _after_one_more(chain)
    best = torch.zeros(len(GRID), len(chain.values), dtype=torch.float64)  # from now on, after a token of bin b
    rows = [torch.full_like(chain.values, torch.inf)]
    for _ in range(max_tokens - 1):
        worth = earned + (1 - part) * best[lower, bins] + part * best[lower + 1, bins]
        going_on = worth @ chain.following.T - price  # (grid, B), rises with survival
        rows.append(_crossing(going_on))
        best = going_on.clamp_min(0)
    worth = earned[-1] + (1 - part[-1]) * best[lower[-1], bins[-1]] + part[-1] * best[lower[-1] + 1, bins[-1]]
    return float(1 - throughput * costs.target_seconds - price + chain.first @ worth), torch.stack(rows[::-1])


def _crossing(going_on: Tensor) -> Tensor:
    """Return the survival above which going on pays, (B,); infinite where it never does."""
    pays = going_on > 0
    after = pays.long().argmax(dim=0).clamp_min(1)
    column = torch.arange(going_on.shape[1])
    above, below = going_on[after, column], going_on[after - 1, column]
    part = torch.where(above > below, -below / (above - below), 0.0).clamp(0, 1)
    log_survival = GRID[after - 1] + part * (GRID[1] - GRID[0])
    log_survival = torch.where(pays[0], -torch.inf, log_survival)
    return torch.where(pays.any(dim=0), log_survival.exp(), torch.inf)


def value_of_going_on(chain: AcceptanceChain, policy: _OptimalStopping) -> tuple[Tensor, Tensor]:
    """Return what a policy still drafts, by token, survival and bin, (max_tokens - 1, grid, B) each: accepted and drafted tokens.

    Accepted tokens are expected given that all tokens so far are accepted; survival, with `GRID`, is what the policy believes.
    """
    lower, part, bins = _after_one_more(chain)
    following, values = chain.following, chain.values
    accepted = drafted = torch.zeros(len(GRID), len(values), dtype=torch.float64)
    rows = []
    for least in policy.least_survival[1:].flip(0):
        goes_on = (GRID.exp()[:, None] > least).double()
        later = [
            (1 - part) * (goes_on * each)[lower, bins] + part * (goes_on * each)[lower + 1, bins] for each in (accepted, drafted)
        ]
        accepted, drafted = (values * (1 + later[0])) @ following.T, (1 + later[1]) @ following.T
        rows.append((accepted, drafted))
    return torch.stack([row[0] for row in rows[::-1]]), torch.stack([row[1] for row in rows[::-1]])


def _after_one_more(chain: AcceptanceChain) -> tuple[Tensor, Tensor, Tensor]:
    """Return where one more token of each bin leaves each survival: the place below on the grid, the part above it, the bin."""
    earned = GRID.exp()[:, None] * chain.values
    place = ((earned.clamp_min(1e-300).log() - GRID[0]) / (GRID[1] - GRID[0])).clamp(0, len(GRID) - 1)
    lower = place.floor().long().clamp_max(len(GRID) - 2)
    return lower, place - lower, torch.arange(len(chain.values)).expand_as(lower)


THRESHOLDS = torch.arange(0.02, 1.0, 0.02, dtype=torch.float64)


@dataclass(frozen=True)
class Drafts:
    """Drafts of K tokens: the acceptance probability of each, given that those before it were accepted; (n, K) float64."""

    acceptance: Tensor

    @classmethod
    def simulated(cls, chain: AcceptanceChain, num: int, num_tokens: int, generator: torch.Generator) -> "Drafts":
        """Return drafts whose acceptance probabilities follow a chain."""
        bins = [torch.multinomial(chain.first, num, replacement=True, generator=generator)]
        while len(bins) < num_tokens:
            bins.append(torch.multinomial(chain.following[bins[-1]], 1, generator=generator).squeeze(1))
        return cls(chain.values[torch.stack(bins, dim=1)])

    @cached_property
    def survival(self) -> Tensor:
        """The probability (n, K) that a token and all before it are accepted."""
        return self.acceptance.cumprod(dim=1)

    def chain(self, num_bins: int = 20) -> AcceptanceChain:
        """Return a chain fitted to the drafts."""
        before, after = self.acceptance[:, :-1], self.acceptance[:, 1:]
        return AcceptanceChain.of(self.acceptance[:, 0], before.flatten(), after.flatten(), num_bins)


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a rule and its standard error over drafts."""

    value: float
    error: float


def speed(drafts: Drafts, lengths: Tensor, costs: StepCosts) -> Speed:
    """Return how fast rounds of these lengths (n,) are; a round emits its accepted tokens and the target's."""
    before_end = torch.arange(drafts.acceptance.shape[1]) < lengths[:, None]
    tokens = 1 + (drafts.survival * before_end).sum(dim=1)
    seconds = costs.target_seconds + costs.draft_seconds * lengths.double()
    value = (tokens.sum() / seconds.sum()).item()
    error = (tokens - value * seconds).std().item() / seconds.mean().item() / len(lengths) ** 0.5
    return Speed(value, error)


def lengths_at(drafts: Drafts, threshold: float) -> Tensor:
    """Return the lengths (n,) of drafts that stop once some token is rejected with a probability above `threshold`."""
    return _first(1 - drafts.survival > threshold)


def lengths_of(drafts: Drafts, chain: AcceptanceChain, policy: _OptimalStopping) -> Tensor:
    """Return the lengths (n,) of drafts under the best policy for a chain."""
    bins = torch.bucketize(drafts.acceptance, chain.edges)
    least = policy.least_survival[torch.arange(bins.shape[1]), bins]
    return _first(drafts.survival <= least)


def _first(stops: Tensor) -> Tensor:
    """Return the number of the first token (n,) after which a draft stops, (n, K); all tokens if it never does."""
    number = torch.arange(1, stops.shape[1] + 1)
    return torch.where(stops, number, stops.shape[1]).amin(dim=1)


def best_threshold(drafts: Drafts, costs: StepCosts) -> float:
    """Return the threshold at which drafts are fastest."""
    return max(THRESHOLDS.tolist(), key=lambda threshold: speed(drafts, lengths_at(drafts, threshold), costs).value)


def best_fixed(drafts: Drafts, costs: StepCosts) -> int:
    """Return the number of tokens with which drafts are fastest."""
    num, longest = drafts.acceptance.shape
    return max(range(1, longest + 1), key=lambda count: speed(drafts, torch.full((num,), count), costs).value)


def automatic_threshold(drafts: Drafts, costs: StepCosts) -> float:
    """Return `1 - lambda t_d / m`: where the next token earns less than its time, at the speed lambda that the rule achieves.

    m is the mean acceptance probability of a next token; lambda and the threshold are found in turns.
    """
    mean, threshold = drafts.acceptance.mean().item(), 0.5
    for _ in range(20):
        achieved = speed(drafts, lengths_at(drafts, threshold), costs).value
        threshold = 1 - achieved * costs.draft_seconds / mean
    return threshold


def theorem_delta(chain: AcceptanceChain, policy: _OptimalStopping, costs: StepCosts) -> float:
    """Return the least constant Delta of theorem 3.1 for the best policy: seconds, at least 0.

    If no token so far will be rejected, drafting on saves time. What it saves beyond the forward pass of the target is Delta
    where it saves most: accepted tokens are worth the time that a token takes, drafted tokens cost theirs.
    """
    accepted, drafted = value_of_going_on(chain, policy)
    saved = accepted / policy.throughput - costs.draft_seconds * drafted
    return max(0.0, saved.max().item() - (costs.target_seconds - costs.draft_seconds))


def theorem_threshold(delta: float, costs: StepCosts) -> float:
    """Return `(c2 + Delta) / (c1 + c2 + Delta)`: at this probability of a rejection, stopping is better (theorem 3.1)."""
    more = costs.target_seconds - costs.draft_seconds + delta
    return more / (costs.draft_seconds + more)


def fewest_calls(disagrees: Sequence[bool]) -> tuple[int, int]:
    """Return the fewest target calls for a greedy text, and the fewest discarded tokens with so few calls, over all lengths.

    Args:
        disagrees: for each token of the text, whether the draft's most likely token differs from the target's.
    """
    num_tokens = len(disagrees)
    best = [(0, 0)] * (num_tokens + 1)  # from each token on
    for start in range(num_tokens - 1, -1, -1):
        right = next((end for end in range(start, num_tokens) if disagrees[end]), num_tokens) - start
        options = []
        for length in range(num_tokens - start + 1):
            accepted = min(length, right)
            calls, discarded = best[min(start + accepted + 1, num_tokens)]
            options.append((calls + 1, discarded + length - accepted))
        best[start] = min(options)
    return best[0]
