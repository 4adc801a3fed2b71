"""What rounds of a batch cost on this machine, by which policies weigh the tokens in flight: a decoder's own rounds, timed."""

import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.load_aware import LengthPolicy, LoadCosts
from specheads.decoding.records import Generation

ROUNDS = 4  # rounds of one length in a row, at least: as in decoding, memory is then in the caches that it is in there


class _Always(LengthPolicy):
    """The same length in every round."""

    def __init__(self, length: int, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._length = length

    def length(self, num_requests: int, positions: int) -> int:
        return self._length


def measured_load_costs(
    decoder: SpeculativeDecoder, max_batch: int, max_tokens: int = 8, context: int = 256, repeats: int = 4
) -> LoadCosts:
    """Return the seconds of a decoder's rounds with up to `max_batch` rows and `max_tokens` drafted tokens, by powers of two.

    Args:
        context: the longest prompt; prompts are made up.
        repeats: times that each size is timed, in random order and with prompts of different lengths.
    """
    context = max(2, min(context, decoder.target_engine.capacity - ROUNDS * (1 + max_tokens)))
    sizes = [(rows, length) for rows in _powers_up_to(max_batch) for length in [0, *_powers_up_to(max_tokens)]]
    timed: dict[tuple[int, int], list[tuple[int, float]]] = {size: [] for size in sizes}
    rng, order, vocab_size = np.random.default_rng(0), random.Random(0), decoder.pair.vocab_size
    for repeat in range(repeats + 1):  # the first one warms up
        prompt_length = max(2, context * max(repeat, 1) // repeats)
        for rows, length in order.sample(sizes, len(sizes)):
            prompts, policy = rng.integers(vocab_size, size=(rows, prompt_length)).tolist(), _Always(length, max_tokens)
            batch = decoder.generate_batch(prompts, max_batch, ROUNDS * (1 + length), stop_tokens=(), policy=policy)
            made = [generation for _, generation in batch]
            timed[rows, length] += _rounds_of(made, length) if repeat else ()
    return fitted(timed)


def _powers_up_to(most: int) -> list[int]:
    return sorted({*(2**power for power in range(most.bit_length())), most})


def _rounds_of(generations: Sequence[Generation], length: int) -> Iterator[tuple[int, float]]:
    """Yield the positions in memory and the seconds of rounds of rows that began together, up to the first that ended."""
    positions = sum(len(each.prompt_ids) for each in generations)
    for number, rounds in enumerate(zip(*(each.rounds for each in generations), strict=False)):
        # The first round reads the prompts, too, and at a row's limit drafts are shorter.
        if number and all(each.num_drafted == length for each in rounds):
            yield positions, rounds[0].seconds - rounds[0].wait_seconds
        positions += sum(len(each.tokens) for each in rounds)


def fitted(timed: Mapping[tuple[int, int], Sequence[tuple[int, float]]]) -> LoadCosts:
    """Return costs from the positions in memory and the seconds of rounds, by rows and drafted tokens: medians.

    What a position costs is fitted to rounds that differ in nothing else. Other work only adds time: the fifth of the rounds
    that took longest is left out of that, and where more rows were faster, fewer were disturbed.
    """
    read = {size: np.array(rounds, dtype=np.float64).T for size, rounds in timed.items() if rounds}
    for (_, length), each in read.items():
        each[0] *= 1 + length  # every forward pass reads the memory
    x, y = np.concatenate([each - each.mean(axis=1, keepdims=True) for each in read.values()], axis=1)
    excess = y - x * _slope(x, y)
    kept = excess <= np.quantile(excess, 0.8) + 1e-12
    slope = max(0.0, _slope(x[kept], y[kept]))
    medians = {size: float(np.median(seconds - slope * passes)) for size, (passes, seconds) in read.items()}
    sizes, longest = sorted({rows for rows, _ in medians}), max(length for _, length in timed)
    table = []
    for rows in sizes:
        lengths = sorted(length for other, length in medians if other == rows)
        table.append(np.interp(range(longest + 1), lengths, [medians[rows, length] for length in lengths]))
    rising = np.maximum(np.minimum.accumulate(table[::-1])[::-1], 1e-9)
    return LoadCosts(sizes, rising.tolist(), slope)


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    """Return the slope of y (n,) in x (n,) by least squares, without a constant."""
    return float(x @ y / max(x @ x, 1e-9))
