"""What rounds of a batch cost on this machine: the table by which policies weigh the tokens in flight.

It is made of rounds that a decoder takes over made-up prompts, so it has everything that a round does, on the host too.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.load.costs import LoadCosts, SecondsTable
from specheads.decoding.load.drafts import Drafts
from specheads.decoding.load.lengths import PlannedLength
from specheads.decoding.records import Generation, Round
from specheads.heads.head import AcceptanceHead


class ListedLengths(PlannedLength):
    """Draft lengths one after another, over and over; `needs`: features that are computed for each token."""

    def __init__(self, lengths: Sequence[int], needs: Collection[str] = ()) -> None:
        super().__init__(max(lengths))
        self.lengths, self.needs, self.num_rounds = lengths, frozenset(needs), 0

    def length(self, drafts: Drafts) -> int:
        return self.lengths[self.num_rounds % len(self.lengths)]

    def learn(self, drafts: Drafts, num_submitted: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        self.num_rounds += 1


class Observed:
    """Seconds of rounds, by what was done in them."""

    def __init__(self) -> None:
        self.alone: dict[int, list[float]] = defaultdict(list)  # a round without drafts, by its rows
        self.target: dict[int, list[float]] = defaultdict(list)  # a verification, by its tokens
        # A round's drafting by its rows: (draft steps, tokens that the first of them read, seconds).
        self.drafting: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
        self.prompts: dict[int, list[float]] = defaultdict(list)  # the target's reading of prompts, by their tokens
        self.catching_up: dict[int, list[tuple[int, int, float]]] = defaultdict(list)  # as `drafting`, with the prompts

    def add(self, rows: Sequence[Generation]) -> None:
        """Take in what rows made that began together, up to the first that ended."""
        lengths = [len(row.prompt_ids) for row in rows]
        self.prompts[sum(lengths) - len(rows)].append(max(row.stats.prefill_seconds for row in rows))
        unread = np.array(lengths)
        for number in range(min(len(row.rounds) for row in rows)):
            rounds = [row.rounds[number] for row in rows]
            self._add_round(rounds, int(unread.sum()), first=number == 0)
            unread = np.array([_unread(before, each) for before, each in zip(unread, rounds, strict=True)])

    def _add_round(self, rounds: Sequence[Round], unread: int, first: bool) -> None:
        one, rows = rounds[0], len(rounds)
        if len({each.num_drafted for each in rounds}) > 1:
            return  # some were at their limits
        verified = one.verify_seconds + one.commit_seconds
        if not one.num_drafted:
            self.alone[rows].append(one.draft_seconds + verified)
            return
        self.target[rows * (1 + one.num_drafted)].append(verified)
        (self.catching_up if first else self.drafting)[rows].append((one.num_drafted, unread, one.draft_seconds))

    def costs(self, provenance: Mapping[str, str]) -> LoadCosts:
        """Return medians as tables."""
        parts = {rows: _parts(rows, values) for rows, values in self.drafting.items()}
        besides = {rows: values[0] for rows, values in parts.items()}
        table = _table({rows: values[1] for rows, values in parts.items()})
        # Prompts are read without sampling, so that few tokens of them may cost less than a step.
        read: dict[int, list[float]] = defaultdict(list)
        for rows, values in self.catching_up.items():
            for number, unread, seconds in values:
                read[unread].append(max(seconds - besides[rows] - (number - 1) * float(table(rows)), table.seconds[-1]))
        longer = {size: statistics.median(values) for size, values in read.items() if size > table.sizes[-1]}
        return LoadCosts(
            draft=_table(dict(zip(table.sizes, table.seconds, strict=True)) | longer),
            target=_table(_medians(self.target)),
            provenance=provenance,
            alone=_table(_medians(self.alone)),
            drafting=_table(besides),
            prompts=_table(_medians(self.prompts)),
        )


def _unread(before: int, done: Round) -> int:
    """Return how many committed tokens a draft has not read after a round; a draft of k tokens has read all but its last."""
    if not done.num_drafted:
        return before + len(done.tokens)
    return len(done.tokens) - min(done.num_accepted, done.num_drafted - 1)


def _parts(rows: int, values: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Return what drafting in some rows takes besides its steps, and a step of one token per row.

    A step that reads more tokens takes longer in proportion to them. Other work only adds time, so the fifth of the rounds that
    took longest beside a first fit is left out of the second.
    """
    steps, unread, seconds = np.array(values).T
    inputs = np.stack([np.ones_like(steps), steps, unread - rows], axis=1)
    weights = np.linalg.lstsq(inputs, seconds)[0]
    excess = seconds - inputs @ weights
    kept = excess <= np.quantile(excess, 0.8) + 1e-12
    besides, step, _ = np.linalg.lstsq(inputs[kept], seconds[kept])[0]
    return max(float(besides), 1e-9), max(float(step), 1e-9)


def _medians(values: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {size: statistics.median(seconds) for size, seconds in values.items()}


def _table(seconds: Mapping[int, float]) -> SecondsTable:
    """Return seconds by size as a table, without falls; a single entry is one of the next size, too."""
    sizes = sorted(seconds)
    values = without_falls([seconds[size] for size in sizes])
    if len(sizes) == 1:
        sizes, values = [sizes[0], sizes[0] + 1], values * 2
    return SecondsTable(tuple(sizes), tuple(values))


def without_falls(seconds: Sequence[float]) -> list[float]:
    """Return seconds by rising size, each at most those of all larger sizes.

    A larger step is not faster. Where it was, the smaller one was disturbed, because other work only ever adds time; were the
    larger ones raised instead, one disturbed step would make all of them look free.
    """
    return np.minimum.accumulate(np.array(seconds)[::-1])[::-1].tolist()


def measured_costs(
    decoder: SpeculativeDecoder,
    max_batch: int,
    max_tokens: int = 8,
    needs: Collection[str] = (),
    head: AcceptanceHead | None = None,
    context: int = 128,
    repeats: int = 4,
) -> LoadCosts:
    """Return the seconds of a decoder's rounds, medians of interleaved repeats.

    Args:
        max_batch: rows; tables go up to `max_batch` x (1 + `max_tokens`) tokens in flight.
        needs, head: the features that a policy reads, and the head of which some of them are: computing them has its price.
        context: the longest prompt.
    """
    lengths = list(range(max_tokens + 1))
    new_tokens = 2 * (sum(lengths) + len(lengths))  # enough to draft every length twice
    context = max(4, min(context, decoder.target_engine.capacity - new_tokens))
    sizes = sorted({*(2**power for power in range(max_batch.bit_length())), max_batch})
    observed = Observed()
    rng, order = np.random.default_rng(0), random.Random(0)
    for repeat in range(repeats + 1):
        length = max(2, context * (max(repeat, 1) * 2 - 1) // (2 * repeats))
        for size in order.sample(sizes, len(sizes)):
            prompts = rng.integers(decoder.pair.vocab_size, size=(size, length)).tolist()
            script = order.sample(lengths, len(lengths))
            if not script[0]:  # the draft reads the prompts in the first round, which therefore drafts
                script.reverse()
            policy = ListedLengths(script, needs)
            rows = decoder.generate_batch(prompts, max_batch, new_tokens, stop_tokens=(), policy=policy, head=head)
            made = [row for _, row in rows]
            if repeat:  # the first one warms up
                observed.add(made)
    pair = decoder.pair
    return observed.costs(
        {
            "target": pair.target_id,
            "draft": pair.draft_id,
            "device": str(pair.target_lm.device),
            "dtype": str(pair.target_lm.output_embedding.weight.dtype),
            "command": f"measured_costs(max_batch={max_batch}, max_tokens={max_tokens}, context={context}, repeats={repeats})",
        }
    )
