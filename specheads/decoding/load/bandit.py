"""A policy that learns the best length for each batch size from the throughput of its rounds."""

from collections.abc import Sequence

import numpy as np

from specheads.decoding.load.drafts import Drafts
from specheads.decoding.load.lengths import PlannedLength
from specheads.errors import UserError, is_count


class BatchSizeBandit(PlannedLength):
    """Draft the length that has had the most tokens per second at this batch size, and sometimes another to find out.

    Batch sizes are grouped by powers of two. The rounds of a group are played in bins of BIN rounds with one length each; the
    n-th bin tries a random length with probability `1 / sqrt(n)` and otherwise takes the best so far. Every length is tried once
    first, the shortest ones before the others. Length 0 turns speculation off.

    Args:
        arms: the lengths to choose from.
        seed: of the random lengths.

    Source: Nightjar (Li et al. 2025, arXiv 2512.22420): a contextual bandit by batch size, with bins that explore or exploit.
    Its growing blocks of bins and its account of the cost to start speculating again are left out.
    """

    BIN = 4

    def __init__(self, arms: Sequence[int] = (0, 1, 2, 3, 4, 6, 8), seed: int = 0) -> None:
        if not arms or not all(is_count(arm) for arm in arms) or len(set(arms)) < len(arms):
            raise UserError(f"arms={list(arms)} must be different non-negative integers, for example [0, 2, 4].")
        super().__init__(max(arms))
        self.arms, self.rng = sorted(arms), np.random.default_rng(seed)
        self.sums: dict[int, np.ndarray] = {}  # by group: (2, arms), the tokens and seconds of each length so far
        self.played: dict[int, tuple[int, int]] = {}  # by group: rounds so far, and the number of the length in this bin

    def length(self, drafts: Drafts) -> int:
        group = drafts.num_requests.bit_length()
        sums = self.sums.setdefault(group, np.zeros((2, len(self.arms))))
        rounds, arm = self.played.get(group, (0, 0))
        number, within = divmod(rounds, self.BIN)
        if within == 0:
            if number < len(self.arms):
                arm = number
            elif self.rng.random() < (number - len(self.arms) + 1) ** -0.5:
                arm = int(self.rng.integers(len(self.arms)))
            else:
                arm = int(np.argmax(sums[0] / sums[1]))
        self.played[group] = rounds, arm
        return self.arms[arm]

    def learn(self, drafts: Drafts, num_submitted: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        group = drafts.num_requests.bit_length()
        rounds, arm = self.played[group]
        self.sums[group][:, arm] += num_accepted.sum() + drafts.num_requests, seconds
        self.played[group] = rounds + 1, arm
