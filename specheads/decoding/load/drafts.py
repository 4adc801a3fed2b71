"""The drafts of one round of a batch, as policies see them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Drafts:
    """What the requests of a batch have drafted so far in this round: arrays over R requests and K places.

    Place j of a row holds the features of its j-th drafted token; places from `lengths` on are undefined. Some features are
    known before the token is sampled (max_prob, entropy), others only after it (draft_prob, a look-ahead head's prediction).
    """

    requests: np.ndarray  # (R,) long, numbers that name requests from round to round
    lengths: np.ndarray  # (R,) long, tokens drafted so far
    capacity: np.ndarray  # (R,) long, tokens that a row may draft before its length limit
    unread: np.ndarray  # (R,) long, committed tokens that the draft has not read yet and reads in its first step
    features: Mapping[str, np.ndarray]  # by name (R, K) float64; before the first token there may be none
    # Tokens of prompts that are read in the same step of the target (chunked prefill, Agrawal et al. 2024).
    prompt_tokens: int = 0
    positions: int = 0  # of all requests in memory, which every step reads

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.lengths)

    @property
    def places(self) -> np.ndarray:
        """Whether a place holds a drafted token, (R, K) bool; K is the longest length."""
        return np.arange(self.longest) < self.lengths[:, None]

    @property
    def longest(self) -> int:
        """The number of draft steps so far."""
        return int(self.lengths.max(initial=0))

    @property
    def base_tokens(self) -> int:
        """The tokens in flight if no drafted token is submitted."""
        return self.num_requests + self.prompt_tokens
