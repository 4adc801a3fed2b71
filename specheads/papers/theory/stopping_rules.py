"""How much a rule that stops at a threshold loses to the best policy, counted on simulated or recorded drafts.

A draft is the acceptance probabilities of its tokens, each given that all before it were accepted. With those known, the accepted
tokens of a rule are expectations, so that only the drafts are random and every rule is counted on the same ones.

Source: SpecDec++ (Huang et al. 2024), section 3.1 and theorem 3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specheads.papers.theory.optimal_stopping import AcceptanceChain, OptimalStopping, value_of_going_on

THRESHOLDS = torch.arange(0.02, 1.0, 0.02, dtype=torch.float64)


@dataclass(frozen=True)
class Costs:
    """Seconds of a draft step and of a forward pass of the target."""

    draft: float
    target: float


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


def speed(drafts: Drafts, lengths: Tensor, costs: Costs) -> Speed:
    """Return how fast rounds of these lengths (n,) are; a round emits its accepted tokens and the target's."""
    before_end = torch.arange(drafts.acceptance.shape[1]) < lengths[:, None]
    tokens = 1 + (drafts.survival * before_end).sum(dim=1)
    seconds = costs.target + costs.draft * lengths.double()
    value = (tokens.sum() / seconds.sum()).item()
    error = (tokens - value * seconds).std().item() / seconds.mean().item() / len(lengths) ** 0.5
    return Speed(value, error)


def lengths_at(drafts: Drafts, threshold: float) -> Tensor:
    """Return the lengths (n,) of drafts that stop once some token is rejected with a probability above `threshold`."""
    return _first(1 - drafts.survival > threshold)


def lengths_of(drafts: Drafts, chain: AcceptanceChain, policy: OptimalStopping) -> Tensor:
    """Return the lengths (n,) of drafts under the best policy for a chain."""
    bins = torch.bucketize(drafts.acceptance, chain.edges)
    least = policy.least_survival[torch.arange(bins.shape[1]), bins]
    return _first(drafts.survival <= least)


def _first(stops: Tensor) -> Tensor:
    """Return the number of the first token (n,) after which a draft stops, (n, K); all tokens if it never does."""
    number = torch.arange(1, stops.shape[1] + 1)
    return torch.where(stops, number, stops.shape[1]).amin(dim=1)


def best_threshold(drafts: Drafts, costs: Costs) -> float:
    """Return the threshold at which drafts are fastest."""
    return max(THRESHOLDS.tolist(), key=lambda threshold: speed(drafts, lengths_at(drafts, threshold), costs).value)


def best_fixed(drafts: Drafts, costs: Costs) -> int:
    """Return the number of tokens with which drafts are fastest."""
    num, longest = drafts.acceptance.shape
    return max(range(1, longest + 1), key=lambda count: speed(drafts, torch.full((num,), count), costs).value)


def automatic_threshold(drafts: Drafts, costs: Costs) -> float:
    """Return `1 - lambda t_d / m`: where the next token earns less than its time, at the speed lambda that the rule achieves.

    m is the mean acceptance probability of a next token; lambda and the threshold are found in turns.
    """
    mean, threshold = drafts.acceptance.mean().item(), 0.5
    for _ in range(20):
        achieved = speed(drafts, lengths_at(drafts, threshold), costs).value
        threshold = 1 - achieved * costs.draft / mean
    return threshold


def theorem_delta(chain: AcceptanceChain, policy: OptimalStopping, costs: Costs) -> float:
    """Return the least constant Delta of theorem 3.1 for the best policy: seconds, at least 0.

    If no token so far will be rejected, drafting on saves time. What it saves beyond the forward pass of the target is Delta
    where it saves most: accepted tokens are worth the time that a token takes, drafted tokens cost theirs.
    """
    accepted, drafted = value_of_going_on(chain, policy)
    saved = accepted / policy.throughput - costs.draft * drafted
    return max(0.0, saved.max().item() - (costs.target - costs.draft))


def theorem_threshold(delta: float, costs: Costs) -> float:
    """Return `(c2 + Delta) / (c1 + c2 + Delta)`: at this probability of a rejection, stopping is better (theorem 3.1)."""
    more = costs.target - costs.draft + delta
    return more / (costs.draft + more)


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
