"""The times that a user waits for tokens."""

import numpy as np

LEVELS = (50, 90, 99)


def token_seconds(tokens: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the seconds of each emitted token, from the tokens (R,) and the seconds (R,) of rounds.

    The tokens of a round arrive together; the seconds of the round are shared equally among them.
    """
    return np.repeat(seconds / tokens, tokens.astype(np.int64))


def milliseconds(seconds: np.ndarray) -> dict[str, float]:
    """Return the percentiles p50, p90 and p99 of seconds, in milliseconds."""
    return {f"p{level}": float(value) for level, value in zip(LEVELS, 1e3 * np.percentile(seconds, LEVELS), strict=True)}
