"""Policies that plan one length for all requests of a round, before it starts."""

from collections.abc import Mapping

import numpy as np

from specheads.decoding.arguments import check_count
from specheads.decoding.load.costs import LoadCosts
from specheads.decoding.load.drafts import Drafts
from specheads.decoding.load.policy import MAX_TOKENS, LoadPolicy, decided
from specheads.errors import UserError, is_count


class PlannedLength(LoadPolicy):
    """The base of these policies."""

    def length(self, drafts: Drafts) -> int:
        """Return how many tokens every row of this round drafts."""
        raise NotImplementedError

    def begin_round(self, drafts: Drafts) -> int:
        return min(self.length(drafts), self.max_tokens)


class FixedK(PlannedLength):
    """Draft `num_tokens` tokens in every round; 0 is the target alone."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)

    def rests(self, num_requests: int, positions: int = 0) -> bool:
        return not self.max_tokens

    def length(self, drafts: Drafts) -> int:
        return self.max_tokens


class FixedKByBatchSize(PlannedLength):
    """Draft as many tokens as a table has for the number of requests: its entry of the nearest number, by their ratio.

    The nearest and not the largest below, because a batch that is measured at 64 requests often decodes a few less, while the
    prompts of others are read.

    Args:
        lengths: tokens by number of requests, fitted on dev prompts.
    """

    def __init__(self, lengths: Mapping[int, int]) -> None:
        if not lengths or not all(is_count(key, least=1) and is_count(value) for key, value in lengths.items()):
            raise UserError(f"lengths={lengths} must be tokens by number of requests, for example {{1: 4, 64: 1}}.")
        self.sizes = np.array(sorted(lengths))
        self.lengths = [lengths[size] for size in self.sizes.tolist()]
        super().__init__(max(self.lengths))

    def length(self, drafts: Drafts) -> int:
        return self.lengths[int(np.argmin(np.abs(np.log(self.sizes / drafts.num_requests))))]


class GoodputK(PlannedLength):
    """Draft the length with the highest expected throughput, from the acceptance of earlier rounds by place in the round.

    The expected throughput of K is `R (1 + sum_{k <= K} prod_{j <= k} alpha_j) / (K draft steps + a target step of R (1 + K)
    tokens)`, where alpha_j is the share of tokens at place j that were accepted where all before them were. A place that was
    never tried has the share of the one before it.

    Args:
        costs: of draft and target steps.
        initial: shares are counted as if `PRIOR` tokens of this acceptance had been seen at every place.

    Source: goodput in SmartSpec (Liu et al. 2024).
    """

    PRIOR = 20.0
    KEPT = 0.995  # of earlier counts after each round

    def __init__(self, costs: LoadCosts, initial: float = 0.6, max_tokens: int = MAX_TOKENS) -> None:
        check_count("max_tokens", max_tokens, least=1)
        super().__init__(max_tokens)
        self.costs, self.initial = costs, initial
        self.accepted, self.tried = np.zeros(max_tokens), np.zeros(max_tokens)

    def length(self, drafts: Drafts) -> int:
        rows = drafts.num_requests
        emitted = rows * (1 + np.concatenate([[0.0], self._shares().cumprod().cumsum()]))
        lengths = range(self.max_tokens + 1)
        seconds = [self.costs.round_seconds(rows, length, rows * (1 + length), drafts.positions) for length in lengths]
        return int(np.argmax(emitted / seconds))

    def _shares(self) -> np.ndarray:
        shares, before = np.empty(self.max_tokens), self.initial
        for place in range(self.max_tokens):
            before = (self.accepted[place] + self.PRIOR * before) / (self.tried[place] + self.PRIOR)
            shares[place] = before
        return shares

    def learn(self, drafts: Drafts, num_submitted: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        if drafts.longest:
            for counts, places in zip((self.accepted, self.tried), decided(drafts, num_submitted, num_accepted), strict=True):
                counts *= self.KEPT
                counts[: drafts.longest] += places.sum(axis=0)
