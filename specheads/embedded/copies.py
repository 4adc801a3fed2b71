"""How much of its training text a model repeats: the longest run of tokens of each response that stands in that text."""

from collections.abc import Sequence

import numpy as np

# Windows are compared by polynomial hashes modulo 2^64 with this factor, a prime. With 14 million windows of text and 130,000 of
# responses, two different ones of a given length have the same hash with a probability of 1e-7.
FACTOR = np.uint64(0x9E3779B97F4A7C55)


def longest_copies(text: np.ndarray, responses: Sequence[Sequence[int]]) -> np.ndarray:
    """Return for each response the number of tokens of its longest run that `text` contains.

    Args:
        text: ids (N,) of all that was trained on.
        responses: ids of each, without the token that ends it, which also ends functions: so no run goes beyond a function.
    """
    lengths = np.array([len(response) for response in responses], dtype=np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    joined = np.concatenate([np.asarray(response, dtype=np.int64) for response in responses] or [np.empty(0, np.int64)])
    last = np.repeat(lengths.cumsum(), lengths)  # where each token's response ends
    windows, in_text = _Windows(joined, last), _Windows(text, np.full(len(text), len(text)))
    longest = np.zeros(len(lengths), dtype=np.int64)
    while len(windows.starts):  # windows grow by a token, those that are nowhere in the other text are dropped
        for each in (windows, in_text):
            each.grow()
        in_text.keep(np.isin(in_text.hashes, np.unique(windows.hashes)))
        windows.keep(np.isin(windows.hashes, np.unique(in_text.hashes)))
        longest[row[windows.starts]] = windows.length
    return longest


class _Windows:
    """Windows of one length in a sequence of tokens, and their hashes.

    Args:
        tokens: ids (N,).
        end: (N,), where the windows that begin at each token have to end.
    """

    def __init__(self, tokens: np.ndarray, end: np.ndarray) -> None:
        self.tokens, self.end, self.length = tokens.astype(np.uint64) + np.uint64(1), end, 0
        self.starts = np.arange(len(tokens))
        self.hashes = np.zeros(len(tokens), dtype=np.uint64)

    def grow(self) -> None:
        """Take one more token into each window; drop windows that it would lead beyond their end."""
        self.keep(self.starts + self.length < self.end[self.starts])
        self.hashes = self.hashes * FACTOR + self.tokens[self.starts + self.length]
        self.length += 1

    def keep(self, kept: np.ndarray) -> None:
        """Drop all windows but those that are marked."""
        self.starts, self.hashes = self.starts[kept], self.hashes[kept]
