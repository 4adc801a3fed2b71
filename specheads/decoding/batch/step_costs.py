"""What steps in rows cost on this machine: the table by which policies weigh the tokens in flight."""

import random
import statistics
from collections.abc import Sequence

import numpy as np
import torch

from specheads.decoding.batch.rows import RowsExample, filled, flat_tokens
from specheads.decoding.batch.steps import RowsTargetStep
from specheads.decoding.engine import Engine, compile_ahead, make_engine
from specheads.decoding.load.costs import LoadCosts, SecondsTable
from specheads.decoding.session import Clock
from specheads.pair import Pair
from specheads.sampling import Warp

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class StepTimer:
    """Times forward passes of one model over tokens of several rows, with the sampling of a token after each."""

    def __init__(self, engine: Engine, warp: Warp, num_rows: int, context: int) -> None:
        """`context`: positions before each token."""
        self._engine, self._num_rows, self._context = engine, num_rows, context
        self._step = engine.rows_step(RowsTargetStep(warp))
        self._clock = Clock(engine.lm.device)

    def warm_up(self) -> None:
        """Prepare the engine."""
        examples = [RowsExample(self._engine, [], many) for many in (False, True)]
        zeros = [example.zeros(example.num_tokens, dtype=torch.float64) for example in examples]
        self._engine.warm_up_rows(self._step, [each.arguments(uniform) for each, uniform in zip(examples, zeros, strict=True)])

    def seconds(self, size: int) -> float:
        """Return the seconds of a step over `size` tokens, spread evenly over the rows."""
        rows = sorted(number % self._num_rows for number in range(size))
        counts = np.bincount(rows)
        texts, device = [[0] * count for count in counts.tolist()], self._engine.lm.device
        least = self._engine.padded_rows(size)
        flat = flat_tokens(range(len(texts)), texts, [self._context] * len(texts), least, self._num_rows, device)
        uniform = filled(np.full(size, 0.5), least, 0.0, device)
        start = self._clock()
        self._step(flat.tokens, flat.end, flat.places, uniform)
        return self._clock() - start


def without_falls(seconds: Sequence[float]) -> list[float]:
    """Return seconds by rising size, each at most those of all larger sizes.

    A larger step is not faster. Where it was, the smaller one was disturbed, because other work only ever adds time; were the
    larger ones raised instead, one disturbed step would make all of them look free.
    """
    return np.minimum.accumulate(np.array(seconds)[::-1])[::-1].tolist()


@torch.no_grad()
def measured_costs(
    pair: Pair, warp: Warp, max_batch: int, engine: str = "auto", context: int = 128, repeats: int = 9, max_tokens: int = 8
) -> LoadCosts:
    """Return the seconds of steps of both models, medians of interleaved repeats.

    Args:
        max_batch: rows; the target reads up to `max_batch` x (1 + `max_tokens`) tokens in a step, the draft up to `max_batch`.
        context: positions before each token.
    """
    capacity = context + max_tokens + 1
    timers = {}
    for name, lm, most in (("draft", pair.draft_lm, max_batch), ("target", pair.target_lm, max_batch * (1 + max_tokens))):
        sizes = sorted({*(size for size in SIZES if size < most), most, max(2, most)})
        timers[name] = StepTimer(make_engine(engine, lm, capacity, num_rows=max_batch + 1), warp, max_batch, context), sizes
    compile_ahead([timer.warm_up for timer, _ in timers.values()])
    for timer, _ in timers.values():
        timer.warm_up()
    calls = [(name, size) for name, (_, sizes) in timers.items() for size in sizes]
    taken: dict[tuple[str, int], list[float]] = {call: [] for call in calls}
    for repeat in range(repeats + 1):
        for name, size in random.Random(repeat).sample(calls, len(calls)):
            seconds = timers[name][0].seconds(size)
            if repeat:  # the first one warms up
                taken[name, size].append(seconds)
    tables = []
    for name, (_, sizes) in timers.items():
        medians = [statistics.median(taken[name, size]) for size in sizes]
        tables.append(SecondsTable(tuple(sizes), tuple(without_falls(medians))))
    provenance = {
        "target": pair.target_id,
        "draft": pair.draft_id,
        "device": str(pair.target_lm.device),
        "dtype": str(pair.target_lm.output_embedding.weight.dtype),
        "command": f"measured_costs(max_batch={max_batch}, context={context}, repeats={repeats})",
    }
    return LoadCosts(tables[0], tables[1], provenance)
