"""TETRIS as published, which is lossy in sampling."""

import numpy as np

from specheads.decoding.arguments import check_count
from specheads.decoding.load.admission import frontier
from specheads.decoding.load.costs import SecondsTable
from specheads.decoding.load.drafts import Drafts
from specheads.decoding.load.policy import MAX_TOKENS, LoadPolicy


class Tetris(LoadPolicy):
    """Draft `max_tokens` tokens and submit those `capacity` of the batch whose products of draft probabilities are largest.

    The probability of the drawn token decides whether that token is submitted, so in sampling the output distribution is not the
    target's: likely tokens are emitted too often or too seldom. Greedy decoding stays exact, because there a token's probability
    is known before the token is.

    Args:
        capacity: drafted tokens of the whole batch that the target verifies at once.

    Source: TETRIS (Wu et al. 2025, arXiv 2502.15197), algorithm 1.
    """

    lossless = False
    admits = True
    needs = frozenset({"draft_prob"})

    def __init__(self, capacity: int, max_tokens: int = MAX_TOKENS) -> None:
        check_count("capacity", capacity, least=1)
        super().__init__(max_tokens)
        self.capacity = capacity

    def admit(self, drafts: Drafts) -> np.ndarray:
        products = drafts.features["draft_prob"][:, : drafts.longest].cumprod(axis=1)
        base = drafts.num_requests
        # Tokens are free up to the capacity, and nothing is worth what they cost beyond it.
        step = SecondsTable((base, base + self.capacity, base + self.capacity + 1), (1.0, 1.0, 3.0))
        return frontier(products, drafts.lengths, step, base, throughput=1.0)
