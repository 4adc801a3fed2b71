"""The loop over rows: refill, let all rows take a round, commit.

Rows know nothing of each other: each has uniform numbers, states of the rules and a length of its own, so its tokens are those
of a decoder for one prompt, up to the rounding of sums.
"""

import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor

from specheads.decoding.batch.rounds import Rounds, RowOutcome
from specheads.decoding.batch.rows import Row
from specheads.decoding.clock import Clock
from specheads.decoding.engine import compile_ahead
from specheads.decoding.records import Generation, Round
from specheads.decoding.session import Prompt, Session, end_flags, open_session
from specheads.errors import UserError
from specheads.pair import Pair
from specheads.sampling import nan_message

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


class BatchDecoder:
    """Decodes prompts in the rows of a batch; a row whose response has ended takes the next prompt."""

    def __init__(self, pair: Pair, rounds: Rounds, num_rows: int) -> None:
        self.pair, self._rounds, self.num_rows = pair, rounds, num_rows
        size = sum(engine.memory_bytes for engine in rounds.engines)
        logger.info("a batch of %d: %.1f MiB of KV memory for each row", num_rows, size / (num_rows + 1) / 2**20)
        self.engines = rounds.engines
        self._clock, self.is_warm = Clock([engine.lm for engine in self.engines]), False

    def warm_up(self) -> None:
        """Compile, load or capture all that generation will run; the first generation does it otherwise."""
        compile_ahead([self.prepare])
        self.prepare()
        self.is_warm = True

    @torch.no_grad()
    def prepare(self) -> None:
        """Prepare all that generation will run, one step after another."""
        for reader in self._rounds.readers:
            reader.warm_up()
        self._rounds.warm_up(self._end_flags(()))

    @torch.no_grad()
    def generate(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int = 256,
        seeds: Sequence[int] | None = None,
        stop_tokens: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """Yield the number of a prompt and its response as responses end; see SpeculativeDecoder.generate_batch."""
        if seeds is not None:
            prompts = list(prompts)
            if len(seeds) != len(prompts):
                raise UserError(f"seeds has {len(seeds)} numbers for {len(prompts)} prompts; give one for each, or none.")
        failures: list[str] = []

        def sessions() -> Iterator[tuple[int, Session]]:
            for number, prompt in enumerate(prompts):
                seed, engines = 0 if seeds is None else seeds[number], self.engines
                try:
                    yield number, open_session(self.pair, prompt, max_new_tokens, seed, stop_tokens, engines, CPU)
                except UserError as error:
                    failures.append(f"prompt {number}: {error}")

        for rows in self.decode(sessions(), self.pair.stop_tokens if stop_tokens is None else stop_tokens):
            for row in rows:
                if row.failure is not None:
                    failures.append(f"prompt {row.number}: {row.failure}")
                elif row.session.finish_reason is not None:
                    yield row.number, row.session.finish(self.pair, row.rounds)
        if failures:
            raise UserError("; ".join(failures))

    @torch.no_grad()
    def decode(self, sessions: Iterable[tuple[int, Session]], stop_tokens: Iterable[int]) -> Iterator[list[Row]]:
        """Yield, after each round, the rows that took it. One that has ended leaves its place to the next session.

        Args:
            sessions: with the numbers of their prompts; read as there is room.
            stop_tokens: ids that end a response and therefore a draft.
        """
        if not self.is_warm:
            self.warm_up()
        for engine in self.engines:
            engine.rewind(0)  # notices weights that were moved or changed
        ends, waiting = self._end_flags(stop_tokens), iter(sessions)
        rows: list[Row] = []
        free = list(range(self.num_rows))[::-1]
        with _frozen_objects():
            while True:
                started = [Row(number, free.pop(), session) for number, session in islice(waiting, len(free))]
                if started:
                    self._start(started)
                rows = sorted([*rows, *started], key=lambda row: row.row)  # in the order of memory, which saves engines copies
                if not rows:
                    return
                self._take_round(rows, ends)
                yield rows
                free += [row.row for row in rows if row.has_ended]
                rows = [row for row in rows if not row.has_ended]

    def _end_flags(self, stop_tokens: Iterable[int]) -> Tensor:
        return end_flags(self.pair.vocab_size, stop_tokens, self.engines[-1].lm.device)

    def _start(self, rows: Sequence[Row]) -> None:
        """Read all of the rows' prompts but their last tokens."""
        start = self._clock.mark()
        prompts = [row.session.committed[:-1] for row in rows]
        known = [number for number, prompt in enumerate(prompts) if prompt]
        target_hidden: dict[int, Tensor] = {}
        places = [rows[number].row for number in known]
        for reader in self._rounds.readers:
            read = reader.read(places, [prompts[number] for number in known])
            target_hidden = target_hidden or dict(zip(places, read, strict=True))  # of the first reader, the target's
        self._rounds.start(rows, target_hidden)
        started, read_at = self._clock.read(start, self._clock.mark())
        for row in rows:
            row.ready_at, row.session.prefill_seconds = read_at, read_at - started

    def _take_round(self, rows: Sequence[Row], ends: Tensor) -> None:
        """Decode a round of each row and commit it, or note why a row cannot go on."""
        start = self._clock.mark()
        outcomes, has_drafted = self._rounds.take(rows, ends, self._clock)
        has_verified = self._clock.mark()
        emitted: list[list[int]] = []
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome.nan_in is not None:
                row.failure = nan_message(outcome.nan_in, len(row.session.response))
                self._clear(row)
            emitted.append([] if row.failure else row.session.commit(outcome.tokens))
            if row.has_ended:
                row.session.num_expected = self._rounds.num_expected(row)
        began, drafted, verified, committed = self._clock.read(start, has_drafted, has_verified, self._clock.mark())
        for row, tokens, outcome in zip(rows, emitted, outcomes, strict=True):
            seconds = began - row.ready_at, drafted - began, verified - drafted, committed - verified
            row.rounds.append(_round(tokens, outcome, seconds))
            row.ready_at = committed

    def _clear(self, row: Row) -> None:
        for engine in self.engines:
            engine.clear_row(row.row)


@contextmanager
def _frozen_objects() -> Iterator[None]:
    """Keep Python's collector from walking through all objects that there are, which takes as long as dozens of rounds.

    Where objects are frozen already, by a server or by another batch, they stay so.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _round(emitted: Sequence[int], outcome: RowOutcome, seconds: tuple[float, float, float, float]) -> Round:
    """Return the record of a row's round.

    Its seconds (before the round, of drafting, of verification, of the commit) are those of all rows, which the row waits for.
    """
    return Round(
        tokens=emitted,
        num_drafted=outcome.num_drafted,
        num_accepted=outcome.num_accepted,
        num_discarded=outcome.num_drafted - outcome.num_accepted,
        num_draft_calls=outcome.num_draft_calls,
        wait_seconds=seconds[0],
        draft_seconds=seconds[1],
        verify_seconds=seconds[2],
        commit_seconds=seconds[3],
    )
