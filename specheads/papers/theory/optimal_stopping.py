"""When a draft should end, as a Markov decision process that is solved exactly (SpecDec++, section 3.1).

After each drafted token the draft may go on or be verified. What is known of the tokens so far is the probability that all of
them are accepted, and the newest one's; the next one's follows from the newest one's by a known law. A round earns its accepted
tokens and the target's one, and costs time. The policy with the highest throughput lambda is the one that maximises tokens minus
lambda times seconds, where that maximum is zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
class OptimalStopping:
    """The best policy: it goes on after token j, which is in bin b, where the survival so far exceeds `least_survival[j - 1, b]`.

    `throughput` is its tokens per second; `least_survival` is (max_tokens, B), infinite where it never goes on.
    """

    throughput: float
    least_survival: Tensor


def optimal_stopping(chain: AcceptanceChain, draft_seconds: float, target_seconds: float, max_tokens: int) -> OptimalStopping:
    """Return the best policy among those that draft 1 to `max_tokens` tokens in a round.

    Args:
        draft_seconds: of a draft step, with what its token adds to a verification.
        target_seconds: of a verification without drafted tokens.
    """
    low, high = 0.0, (max_tokens + 1) / target_seconds
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        worth, _ = _round_worth(chain, draft_seconds, target_seconds, max_tokens, middle)
        low, high = (middle, high) if worth > 0 else (low, middle)
    return OptimalStopping(low, _round_worth(chain, draft_seconds, target_seconds, max_tokens, low)[1])


def _round_worth(
    chain: AcceptanceChain, draft_seconds: float, target_seconds: float, max_tokens: int, throughput: float
) -> tuple[float, Tensor]:
    """Return the most that tokens minus throughput times seconds of a round can be, and the policy's `least_survival`."""
    price, survival = throughput * draft_seconds, GRID.exp()
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
    return float(1 - throughput * target_seconds - price + chain.first @ worth), torch.stack(rows[::-1])


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


def value_of_going_on(chain: AcceptanceChain, policy: OptimalStopping) -> tuple[Tensor, Tensor]:
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
