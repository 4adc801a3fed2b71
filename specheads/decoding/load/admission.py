"""Which drafted tokens of a batch are submitted to the target: those whose expected gain is worth their cost.

Output stays the target's if whether token j of a request is submitted depends on tokens 1 to j - 1 of that request and on
everything of other requests, but never on token j itself or on later ones. So a token's survival is the product of the predicted
acceptance of the tokens before it, which may be predicted after they were sampled, and of the expected acceptance (the overlap,
1 - TV) of the token itself, predicted before it is sampled. Such survival may rise along a request.

Source: algorithm 1 of DSpark (Cheng et al. 2026).
"""

import numpy as np

from specheads.decoding.load.costs import SecondsBySize


def survival_of(acceptance: np.ndarray, overlap: np.ndarray) -> np.ndarray:
    """Return the probability (R, K) that each token is accepted, as it is known before the token is sampled.

    Args:
        acceptance: (R, K), that each token is accepted if all before it are; predicted after it was sampled.
        overlap: (R, K), the same, predicted before it was sampled.
    """
    before = np.ones_like(overlap)
    np.cumprod(acceptance[:, :-1], axis=1, out=before[:, 1:])
    return before * overlap


def frontier(
    survival: np.ndarray,
    lengths: np.ndarray,
    seconds: SecondsBySize,
    base_tokens: int,
    other_seconds: float = 0.0,
    throughput: float | None = None,
) -> np.ndarray:
    """Return how many tokens of each request are submitted, (R,) long.

    Of each request's next token the one with the largest survival is admitted, as long as that raises the expected throughput,
    `(R + sum of admitted survival) / (other_seconds + seconds(base_tokens + admitted))`. The first token that does not raise it
    ends the admission. Of equal tokens those of the first request come first.

    Args:
        survival: (R, K), from `survival_of`.
        lengths: (R,) long, tokens drafted per request.
        seconds: of a target step by its tokens in flight, convex (see `LoadCosts.verification`).
        base_tokens: tokens in flight without any drafted one: R, and those of prompts.
        other_seconds: of the round besides the target's step. They must not depend on tokens of this round: with the steps that
            were drafted, a length that was chosen by looking at a token, a token would decide whether it is submitted.
        throughput: in tokens per second, known from earlier rounds; a token is then admitted as long as its survival is above
            what its seconds are worth at this throughput. None: as long as it raises the throughput of this round.
    """
    num_requests, width = survival.shape
    drafted = np.arange(width) < lengths[:, None]
    # The smallest survival so far in its row gives the order of a heap of each request's next token only: a token that rises
    # above the one before it is next as soon as that one is admitted.
    reached = np.minimum.accumulate(survival, axis=1).ravel()
    candidates = np.flatnonzero(drafted.ravel())
    order = candidates[np.argsort(-reached[candidates], kind="stable")]
    gains = survival.ravel()[order]
    costs = seconds(base_tokens + np.arange(len(order) + 1))
    if throughput is None:
        expected = num_requests + np.concatenate([[0.0], gains.cumsum()])
        rates = expected / (other_seconds + costs)
        rises = rates[1:] > rates[:-1]
    else:
        rises = gains > throughput * np.diff(costs)
    num_admitted = len(order) if rises.all() else int(np.argmin(rises))
    return np.bincount(order[:num_admitted] // width, minlength=num_requests)
