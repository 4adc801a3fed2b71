"""What rounds of a batch cost on this machine: the table by which policies weigh the tokens in flight.

It is made of rounds that a decoder takes over made-up prompts, so it has everything that a round does, on the host too.
"""

import itertools
import logging
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.engine import artefacts
from specheads.decoding.load_aware import LengthPolicy
from specheads.decoding.records import Generation, Round
from specheads.decoding.step_costs import LoadCosts, SecondsTable
from specheads.errors import UserError
from specheads.storage.files import cache_folder
from specheads.storage.shards import fingerprint

logger = logging.getLogger(__name__)

SAME, NUM_ALONE = 3, 24  # rounds in turn that draft the same number of tokens, or none


class _Listed(LengthPolicy):
    """Drafts lengths one after another, over and over."""

    def __init__(self, lengths: Sequence[int], max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._lengths = itertools.cycle(lengths)

    def length(self, num_requests: int, positions: int) -> int:
        return next(self._lengths)


class _Observed:
    """Seconds of rounds, by what was done in them: rows of numbers whose last one is the seconds."""

    def __init__(self) -> None:
        # A round without drafts by its rows, and a verification by its tokens: positions in memory, these times the tokens that
        # attend to each, seconds.
        self.alone: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        self.target: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        # Drafting by rows: one, steps, tokens beyond one per row that the first step read, positions that all read, seconds.
        self.drafting: dict[int, list[tuple[float, ...]]] = defaultdict(list)

    def add(self, rows: Sequence[Generation]) -> None:
        """Take in what rows made that began together, up to the first that ended."""
        unread, count = [len(row.prompt_ids) for row in rows], len(rows)
        positions = sum(unread)
        for number in range(min(len(row.rounds) for row in rows)):
            rounds = [row.rounds[number] for row in rows]
            done, length = rounds[0], rounds[0].num_drafted
            verified = done.verify_seconds + done.commit_seconds
            if any(each.num_drafted != length for each in rounds):
                pass  # some were at their limits
            elif not length:
                self.alone[count].append((positions, positions, done.draft_seconds + verified))
            else:
                self.target[count * (1 + length)].append((positions, positions * (1 + length), verified))
                if number:  # the first round reads the prompts, too
                    self.drafting[count].append((1, length, sum(unread) - count, length * positions, done.draft_seconds))
            positions += sum(len(each.tokens) for each in rounds)
            unread = [_unread(before, each) for before, each in zip(unread, rounds, strict=True)]

    def costs(self, provenance: Mapping[str, str]) -> LoadCosts:
        """Return medians as tables: of steps that read one token of each row, on an empty memory.

        A draft step that reads more tokens takes longer in proportion to them.
        """
        of_target = self._of_target()
        drafting = {rows: np.array(values, dtype=np.float64) for rows, values in self.drafting.items()}
        most = drafting[max(drafting)]  # rows, whose memory differs most
        of_draft = max(float(_fit(most[:, :4], most[:, 4])[3]), 0.0)
        parts = {rows: _fit(values[:, :3], values[:, 4] - of_draft * values[:, 3]) for rows, values in drafting.items()}

        def without_memory(timed: Mapping[int, list[tuple[float, ...]]]) -> SecondsTable:
            return _table({size: float(np.median(np.array(values) @ [*(-of_target), 1.0])) for size, values in timed.items()})

        return LoadCosts(
            draft=_table({rows: float(step) for rows, (_, step, _) in parts.items()}),
            target=without_memory(self.target),
            provenance=provenance,
            alone=without_memory(self.alone),
            drafting=_table({rows: float(once) for rows, (once, _, _) in parts.items()}),
            target_position=float(of_target[0]),
            draft_position=of_draft,
            target_attention=float(of_target[1]),
        )

    def _of_target(self) -> np.ndarray:
        """Return the seconds per position in memory, and per position that a token attends to, of the target's steps.

        They come from rounds that differ in nothing else; neither is below 0.
        """
        groups = [np.array(group, dtype=np.float64) for group in (*self.alone.values(), *self.target.values())]
        rounds = np.concatenate([group - group.mean(axis=0) for group in groups])
        both = _fit(rounds[:, :2], rounds[:, 2])
        if both.min() >= 0:
            return both
        stronger = int(np.argmax(both))
        slopes = np.zeros(2)
        slopes[stronger] = max(_fit(rounds[:, [stronger]], rounds[:, 2])[0], 0.0)
        return slopes


def _fit(inputs: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the coefficients (m,) of inputs (n, m) by least squares.

    Other work only adds time, so the fifth of the rounds that took longest beside a first fit is left out of the second.
    """
    excess = seconds - inputs @ np.linalg.lstsq(inputs, seconds)[0]
    kept = excess <= np.quantile(excess, 0.8) + 1e-12
    return np.linalg.lstsq(inputs[kept], seconds[kept])[0]


def _unread(before: int, done: Round) -> int:
    """Return how many committed tokens a draft has not read after a round; a draft of k tokens has read all but its last."""
    if not done.num_drafted:
        return before + len(done.tokens)
    return len(done.tokens) - min(done.num_accepted, done.num_drafted - 1)


def _table(seconds: Mapping[int, float]) -> SecondsTable:
    """Return seconds by size as a table; a single entry is one of the next size, too.

    Where a larger step was faster, the smaller one was disturbed, because other work only ever adds time.
    """
    sizes = sorted(seconds)
    values = np.maximum(np.minimum.accumulate([seconds[size] for size in reversed(sizes)])[::-1], 1e-9).tolist()
    if len(sizes) == 1:
        sizes, values = [sizes[0], sizes[0] + 1], values * 2
    return SecondsTable(tuple(sizes), tuple(values))


def kept_costs(decoder: SpeculativeDecoder, max_batch: int, max_tokens: int = 8) -> LoadCosts:
    """Return the costs that were measured on this machine before, from the cache folder's `costs`, or measure them now."""
    pair, engine = decoder.pair, decoder.target_engine
    key = fingerprint(
        {
            "machine": [*artefacts.machine(), str(torch.get_num_threads()), str(engine.lm.device), type(engine).__name__],
            "code": artefacts.sources_of("decoding", "heads", "pair"),
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
    decoder: SpeculativeDecoder, max_batch: int, max_tokens: int = 8, context: int = 256, repeats: int = 6
) -> LoadCosts:
    """Return the seconds of a decoder's rounds, medians of interleaved repeats.

    Args:
        max_batch: rows; tables go up to `max_batch` x (1 + `max_tokens`) tokens in flight.
        context: the longest prompt.
    """
    new_tokens = SAME * sum(1 + length for length in range(1, max_tokens + 1)) + 1
    context = max(4, min(context, decoder.target_engine.capacity - new_tokens))
    sizes = sorted({*(2**power for power in range(max_batch.bit_length())), max_batch})
    pair, observed, rng, order = decoder.pair, _Observed(), np.random.default_rng(0), random.Random(0)
    for repeat in range(repeats + 1):
        prompt_length = max(2, context * (max(repeat, 1) * 2 - 1) // (2 * repeats))
        for size in order.sample(sizes, len(sizes)):
            # As decoding does them: the same many times over, so that memory is in the caches that it is in then.
            drafted = [length for length in order.sample(range(1, max_tokens + 1), max_tokens) for _ in range(SAME)]
            for lengths, most in ((drafted, new_tokens), ([0], NUM_ALONE)):
                prompts = rng.integers(pair.vocab_size, size=(size, prompt_length)).tolist()
                policy = _Listed(lengths, max_tokens)
                rows = decoder.generate_batch(prompts, max_batch, most, stop_tokens=(), policy=policy)
                made = [row for _, row in rows]
                if repeat:  # the first one warms up
                    observed.add(made)
    return observed.costs(
        {
            "target": pair.target_id,
            "draft": pair.draft_id,
            "device": str(pair.target_lm.device),
            "dtype": str(pair.target_lm.output_embedding.weight.dtype),
            "command": f"measured_costs(max_batch={max_batch}, max_tokens={max_tokens}, context={context}, repeats={repeats})",
        }
    )
