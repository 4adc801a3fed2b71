"""What rounds of a batch cost on this machine: the table by which policies weigh the tokens in flight.

It is made of rounds that a decoder takes over made-up prompts, so it has everything that a round does, on the host too.
"""

import itertools
import logging
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.engine import artefacts
from specheads.decoding.load_aware import LengthPolicy, LoadCosts, SecondsTable
from specheads.decoding.records import Generation, Round
from specheads.errors import UserError
from specheads.storage.files import cache_folder
from specheads.storage.shards import fingerprint

logger = logging.getLogger(__name__)

SAME, NUM_ALONE = 3, 24  # rounds in turn that draft the same number of tokens, or none


class _ListedLengths(LengthPolicy):
    """Drafts lengths one after another, over and over."""

    def __init__(self, lengths: Sequence[int], max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._lengths = itertools.cycle(lengths)

    def length(self, num_requests: int, positions: int) -> int:
        return next(self._lengths)


Timed = list[tuple[int, int, float]]  # positions in memory, these times the tokens that attend to each, seconds


@dataclass(frozen=True)
class Drafted:
    """The drafting of a round: its steps, the tokens that the first of them read, positions in memory, and seconds."""

    steps: int
    unread: int
    positions: int
    seconds: float


class Observed:
    """Seconds of rounds, by what was done in them."""

    def __init__(self) -> None:
        self.alone: dict[int, Timed] = defaultdict(list)  # a round without drafts, by its rows
        self.target: dict[int, Timed] = defaultdict(list)  # a verification, by its tokens
        self.drafting: dict[int, list[Drafted]] = defaultdict(list)  # by rows

    def add(self, rows: Sequence[Generation]) -> None:
        """Take in what rows made that began together, up to the first that ended."""
        lengths = [len(row.prompt_ids) for row in rows]
        unread, positions = np.array(lengths), sum(lengths)
        for number in range(min(len(row.rounds) for row in rows)):
            rounds = [row.rounds[number] for row in rows]
            self._add_round(rounds, int(unread.sum()), positions, first=number == 0)
            positions += sum(len(each.tokens) for each in rounds)
            unread = np.array([_unread(before, each) for before, each in zip(unread, rounds, strict=True)])

    def _add_round(self, rounds: Sequence[Round], unread: int, positions: int, first: bool) -> None:
        done, rows = rounds[0], len(rounds)
        if len({each.num_drafted for each in rounds}) > 1:
            return  # some were at their limits
        verified = done.verify_seconds + done.commit_seconds
        if not done.num_drafted:
            self.alone[rows].append((positions, positions, done.draft_seconds + verified))
            return
        self.target[rows * (1 + done.num_drafted)].append((positions, positions * (1 + done.num_drafted), verified))
        drafted = Drafted(done.num_drafted, unread, positions, done.draft_seconds)
        if not first:  # the first round reads the prompts, too
            self.drafting[rows].append(drafted)

    def costs(self, provenance: Mapping[str, str]) -> LoadCosts:
        """Return medians as tables."""
        of_target, of_draft = self._of_target(), self._of_draft()
        parts = {rows: _parts(rows, values, of_draft) for rows, values in self.drafting.items()}
        return LoadCosts(
            draft=_table({rows: step for rows, (_, step) in parts.items()}),
            target=_table(_without_memory(self.target, of_target)),
            provenance=provenance,
            alone=_table(_without_memory(self.alone, of_target)),
            drafting=_table({rows: once for rows, (once, _) in parts.items()}),
            target_position=of_target[0],
            draft_position=of_draft,
            target_attention=of_target[1],
        )

    def _of_target(self) -> tuple[float, float]:
        """Return the seconds per position in memory, and per position that a token attends to, of the target's steps.

        They come from rounds that differ in nothing else; neither is below 0.
        """
        groups = [np.array(group, dtype=np.float64) for group in (*self.alone.values(), *self.target.values())]
        rounds = np.concatenate([group - group.mean(axis=0) for group in groups])
        both = _fit(rounds[:, :2], rounds[:, 2])
        if both.min() >= 0:
            return float(both[0]), float(both[1])
        weaker = int(np.argmin(both))
        (slope,) = _fit(rounds[:, [1 - weaker]], rounds[:, 2])
        return (0.0, max(float(slope), 0.0)) if weaker == 0 else (max(float(slope), 0.0), 0.0)

    def _of_draft(self) -> float:
        """Return the seconds per position in memory of a draft step."""
        most = max(self.drafting)  # rows, whose memory differs most
        values = self.drafting[most]
        return max(float(_fit(_drafting_inputs(most, values, memory=True), [each.seconds for each in values])[-1]), 0.0)


def _fit(inputs: np.ndarray, seconds: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the coefficients (m,) of inputs (n, m) by least squares.

    Other work only adds time, so the fifth of the rounds that took longest beside a first fit is left out of the second.
    """
    outputs = np.asarray(seconds)
    excess = outputs - inputs @ np.linalg.lstsq(inputs, outputs)[0]
    kept = excess <= np.quantile(excess, 0.8) + 1e-12
    return np.linalg.lstsq(inputs[kept], outputs[kept])[0]


def _drafting_inputs(rows: int, values: Sequence[Drafted], memory: bool) -> np.ndarray:
    """Return (n, 3) or with memory (n, 4): one, steps, tokens beyond one per row, and positions that the steps read."""
    columns = [[1, each.steps, each.unread - rows, each.steps * each.positions] for each in values]
    return np.array(columns, dtype=np.float64)[:, : 4 if memory else 3]


def _memory(drafted: Drafted, per_position: float) -> float:
    """Return the seconds that reading memory takes in all draft steps of a round."""
    return per_position * drafted.steps * drafted.positions


def _without_memory(timed: Mapping[int, Timed], of_target: tuple[float, float]) -> dict[int, float]:
    """Return the median seconds by size that a step would take on an empty memory."""
    rest = {size: np.array(values)[:, 2] - np.array(values)[:, :2] @ np.array(of_target) for size, values in timed.items()}
    return {size: max(float(np.median(seconds)), 1e-9) for size, seconds in rest.items()}


def _unread(before: int, done: Round) -> int:
    """Return how many committed tokens a draft has not read after a round; a draft of k tokens has read all but its last."""
    if not done.num_drafted:
        return before + len(done.tokens)
    return len(done.tokens) - min(done.num_accepted, done.num_drafted - 1)


def _parts(rows: int, values: Sequence[Drafted], per_position: float) -> tuple[float, float]:
    """Return what drafting in some rows takes besides its steps, and a step of one token per row, both without reading memory.

    A step that reads more tokens takes longer in proportion to them.
    """
    seconds = [each.seconds - _memory(each, per_position) for each in values]
    besides, step, _ = _fit(_drafting_inputs(rows, values, memory=False), seconds)
    return max(float(besides), 1e-9), max(float(step), 1e-9)


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


def kept_costs(decoder: SpeculativeDecoder, max_batch: int, max_tokens: int = 8) -> LoadCosts:
    """Return the costs that were measured on this machine before, in the folder `costs` of the cache folder, or measure them now.

    See `measured_costs`.
    """
    pair, engine = decoder.pair, decoder.target_engine
    key = fingerprint(
        {
            "machine": [*artefacts.machine(), str(torch.get_num_threads()), str(engine.lm.device), type(engine).__name__],
            "code": artefacts.sources_of(__name__),
            "pair": [pair.target_id, pair.target_revision, pair.draft_id, pair.draft_revision],
            "types": [str(lm.output_embedding.weight.dtype) for lm in (pair.target_lm, pair.draft_lm)],
            "rules": [repr(decoder.warp), repr(decoder.verification.compile_key)],
            "sizes": [max_batch, max_tokens, engine.capacity],
        }
    )
    path = cache_folder() / "costs" / f"{key}.json"
    if path.is_file():
        try:
            costs = LoadCosts.read(path)
            logger.info("costs of rounds: those of %s; remove it to measure them again", path)
            return costs
        except UserError as error:
            logger.warning("%s They are measured again.", error)
    logger.info("costs of rounds: measured with up to %d rows and %d drafted tokens, into %s", max_batch, max_tokens, path)
    costs = measured_costs(decoder, max_batch, max_tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    costs.write(path)
    return costs


def measured_costs(
    decoder: SpeculativeDecoder,
    max_batch: int,
    max_tokens: int = 8,
    context: int = 256,
    repeats: int = 6,
) -> LoadCosts:
    """Return the seconds of a decoder's rounds, medians of interleaved repeats.

    Args:
        max_batch: rows; tables go up to `max_batch` x (1 + `max_tokens`) tokens in flight.
        context: the longest prompt.
    """
    new_tokens = SAME * sum(1 + length for length in range(1, max_tokens + 1)) + 1
    context = max(4, min(context, decoder.target_engine.capacity - new_tokens))
    sizes = sorted({*(2**power for power in range(max_batch.bit_length())), max_batch})
    observed = Observed()
    rng, order = np.random.default_rng(0), random.Random(0)

    def run(size: int, prompt_length: int, lengths: Sequence[int]) -> list[Generation]:
        prompts = rng.integers(decoder.pair.vocab_size, size=(size, prompt_length)).tolist()
        policy, most = _ListedLengths(lengths, max_tokens), new_tokens if any(lengths) else NUM_ALONE
        made = decoder.generate_batch(prompts, max_batch, most, stop_tokens=(), policy=policy)
        return [row for _, row in made]

    for repeat in range(repeats + 1):
        prompt_length = max(2, context * (max(repeat, 1) * 2 - 1) // (2 * repeats))
        for size in order.sample(sizes, len(sizes)):
            # As decoding does them: the same many times over, so that memory is in the caches that it is in then.
            drafted = [length for length in order.sample(range(1, max_tokens + 1), max_tokens) for _ in range(SAME)]
            for lengths in (drafted, [0]):
                rows = run(size, prompt_length, lengths)
                if repeat:  # the first one warms up
                    observed.add(rows)
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
