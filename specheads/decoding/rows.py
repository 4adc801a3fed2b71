"""The loop of decoding: rows take prompts, take rounds together, and commit what a round brought,
until their responses end.

Each row has separate uniform numbers, states of the rules and a length, so its tokens do not depend
on its neighbours, up to the rounding of sums. examples/speculative_decoding.py is the algorithm
without caches.
"""

import gc
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from numbers import Integral
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from specheads.decoding.engine import Engine, compile_ahead
from specheads.decoding.records import Clock, DecodeStats, Generation, Mark, Round
from specheads.decoding.step_inputs import PromptReader
from specheads.errors import UserError
from specheads.load import adapt_threads, threads_by_load
from specheads.pair.pair import Pair, checked_ids
from specheads.pair.sampling import Uniforms, nan_message

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
MAX_WINDOW = (
    4096  # models that reach 128k positions would otherwise fill a device with empty memory
)
MOST_NAMED = 8  # prompts that failed, in a message
# engines that decode now
_in_use = WeakSet[Engine]()
_lock = Lock()
_used, _of_parent = (
    WeakSet[Engine](),
    WeakSet[Engine](),
)  # that have decoded: ever, and before this process was forked
_frozen_by: str | None = None  # who keeps Python's collector from objects, once it is known

StopTokens = int | Iterable[int] | Tensor | None
Prompt = str | Sequence[dict[str, str]] | Sequence[int] | Tensor


@contextmanager
def plain_torch() -> Iterator[None]:
    """Compute as where the caller has set no mode: its tensors must serve later calls, which may be
    outside of that mode.
    """
    made = torch.empty(0)  # which shows the caller's modes, and costs a microsecond
    if made.is_cpu and not made.is_inference():
        with torch.no_grad():
            yield
    else:
        with torch.inference_mode(False), torch.no_grad(), CPU:
            yield


def checked_number(
    name: str, value: Any, least: int = 1, most: float = math.inf, what: str = ""
) -> int:
    """Return an integer, of numpy for example, from `least` to `most`.

    Raises UserError for anything else, with `what` it is.
    """
    if isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most:
        return int(value)
    expected = (
        f"between {least} and {most}"
        if most < math.inf
        else "a positive integer"
        if least
        else "a non-negative integer"
    )
    raise UserError(f"{name}={value!r} must be {expected}{what}.")


def checked_window(pair: Pair, window: int | None) -> int:
    """Return the positions to allocate; raises UserError for more than the target reaches."""
    most = pair.target_lm.window
    if window is None:
        return min(most, MAX_WINDOW)
    return checked_number("window", window, 2, most, ", the positions that the target reaches")


def checked_stop_tokens(stop_tokens: StopTokens) -> list[int] | None:
    """Return the ids of `stop_tokens`, a single one or several.

    Raises UserError for anything else, text for example.
    """
    try:
        return (
            None
            if stop_tokens is None
            else checked_ids(stop_tokens if isinstance(stop_tokens, Iterable) else [stop_tokens])
        )
    except TypeError:
        raise UserError(
            f"stop_tokens={stop_tokens!r} must be token ids, such as [2]; for a token's text, take "
            "pair.tokenizer.convert_tokens_to_ids."
        ) from None


def failed(failures: Mapping[int, str]) -> UserError:
    """Return the error about prompts that failed, by their number."""
    named = [f"prompt {number}: {failure}" for number, failure in sorted(failures.items())]
    more = [f"and {len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
    return UserError("; ".join([*named[:MOST_NAMED], *more]))


@dataclass
class Row:
    """A response in progress."""

    number: int  # the prompt's number
    committed: list[int]  # prompt and response
    prompt_length: int
    limit: int  # length of the text at which the response ends
    draft_limit: int  # and up to which the draft reads it
    max_new_tokens: int
    stop_tokens: frozenset[int]
    draft_uniforms: Uniforms
    verify_uniforms: Uniforms
    place: int = 0  # where the row is in the engines' memory
    num_read: int = 0  # positions in the draft's memory, of steps in rows
    drafted: list[int] = field(
        default_factory=list
    )  # this round's tokens, where steps draft for all rows
    num_drafted: int = 0  # this round's drafted tokens
    num_draft_calls: int = 0  # this round's draft steps
    rounds: list[Round] = field(default_factory=list)
    ready_at: float = (
        0.0  # the clock's time when its prompt was read, or its last tokens were committed
    )
    prefill_seconds: float = 0.0
    num_expected: float | None = None  # see DecodeStats
    finish_reason: str | None = None
    failure: str | None = None  # why it cannot go on

    @property
    def response(self) -> list[int]:
        return self.committed[self.prompt_length :]

    @property
    def most_drafted(self) -> int:
        """The most tokens that a draft may have: the target adds one after the accepted ones."""
        return max(0, min(self.limit, self.draft_limit) - len(self.committed) - 1)

    @property
    def has_ended(self) -> bool:
        return self.failure is not None or self.finish_reason is not None

    @property
    def unread(self) -> list[int]:
        committed = self.committed
        return committed[self.num_read :] + self.drafted[max(0, self.num_read - len(committed)) :]

    def fail_by_nan(self, model: str) -> None:
        """End the response because a model's logits were NaN.

        What its last round brought means nothing.
        """
        self.failure = nan_message(model, len(self.response))

    def commit(self, tokens: Sequence[int]) -> list[int]:
        """Append `tokens` up to the first stop token and note whether the response has ended.

        Return the appended ones.
        """
        end = next((i for i, token in enumerate(tokens) if token in self.stop_tokens), None)
        emitted = list(tokens if end is None else tokens[: end + 1])
        self.committed += emitted
        if end is not None:
            self.finish_reason = "stop"
        elif len(self.committed) >= self.limit:
            self.finish_reason = (
                "length" if len(self.response) >= self.max_new_tokens else "context"
            )
        return emitted

    @plain_torch()
    def generation(self, pair: Pair) -> Generation:
        """Return the record of a response that has ended; raises UserError for one that failed."""
        if self.failure is not None:
            raise UserError(self.failure)
        if self.finish_reason is None:
            raise RuntimeError("the response has not ended")
        tokens = torch.tensor(self.response)
        stats = DecodeStats.of(self.rounds, self.prefill_seconds, self.num_expected)
        prompt_ids = torch.tensor(self.committed[: self.prompt_length])
        return Generation(
            prompt_ids,
            tokens,
            pair.decode(tokens),
            self.rounds,
            stats,
            self.finish_reason,
            pair.tokenizer,
        )


class Rounds:
    """The base of how rows get their next tokens."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        """`engines`: the target's, then the draft's if there is one."""
        self.engines = engines
        self.readers = [
            PromptReader(engine) for engine in engines
        ]  # they read prompts before the first round

    def warm_up(self, ends: Tensor) -> None:
        """Prepare the engines for all that rounds run; see `take` for `ends`."""
        raise NotImplementedError

    def start(self, rows: Sequence[Row]) -> None:
        """Begin rows whose prompts were read."""

    def num_expected(self, row: Row) -> float | None:
        """Return how many accepted tokens the stopping rule expected in a row; see DecodeStats."""
        return None

    def take(self, rows: Sequence[Row], ends: Tensor, clock: Clock) -> tuple[list[Round], Mark]:
        """Return each row's round without its seconds, and the mark after drafting.

        Tokens of `ends` (V,) bool end drafts.
        """
        raise NotImplementedError


class RowsDecoder:
    """Decodes prompts in rows; a row whose response has ended takes the next prompt."""

    def __init__(self, pair: Pair, rounds: Rounds) -> None:
        self.pair = pair
        self.rounds = rounds
        self.engines = rounds.engines
        self._single = (
            self.engines[0].num_rows == 1
        )  # by `Engine.compiled_step`; others have a spare row that fills steps up
        self.num_rows = max(1, self.engines[0].num_rows - 1)
        if not self._single:
            size = sum(engine.memory_bytes for engine in self.engines)
            logger.info(
                "a batch of %d: %.1f MiB of KV memory for each row",
                self.num_rows,
                size / (self.num_rows + 1) / 2**20,
            )
        self._clock = Clock([engine.lm for engine in self.engines])
        self.is_warm = False

    def warm_up(self) -> None:
        """Compile, load or capture all that generation will run.

        Raises UserError where the engines' memory is in use.
        """
        compile_ahead([self.prepare])
        self.prepare()
        self.is_warm = True

    @plain_torch()
    def prepare(self) -> None:
        """Prepare all that generation will run, one step after another.

        Raises UserError as `warm_up`.
        """
        with _owned(self.engines):
            for reader in self.rounds.readers:
                reader.warm_up()
            self.rounds.warm_up(self._end_flags(()))

    @plain_torch()
    def row(
        self,
        number: int,
        prompt: Prompt,
        max_new_tokens: int,
        seed: int,
        stop_tokens: Iterable[int] | None,
        verify_uniforms: Uniforms | None = None,
    ) -> Row:
        """Encode a prompt; nothing is read yet.

        Raises UserError for one that does not fit into memory.
        """
        max_new_tokens = checked_number("max_new_tokens", max_new_tokens)
        seed = checked_number("seed", seed, 0)
        committed = self.pair.encode(prompt).tolist()
        window = self.engines[0].capacity
        if len(committed) >= window:
            raise UserError(
                f"the prompt has {len(committed)} tokens, but the decoder has memory for {window};"
                " give it a larger window=."
            )
        target_device, draft_device = (
            self.engines[place].lm.device if self._single else CPU for place in (0, -1)
        )
        return Row(
            number=number,
            committed=committed,
            prompt_length=len(committed),
            limit=min(len(committed) + max_new_tokens, window),
            draft_limit=self.engines[-1].capacity,
            max_new_tokens=max_new_tokens,
            stop_tokens=self.pair.stop_tokens if stop_tokens is None else frozenset(stop_tokens),
            # Separate streams, so that a draft's length does not shift the numbers of verification.
            draft_uniforms=Uniforms(draft_device, seed, 0),
            verify_uniforms=verify_uniforms or Uniforms(target_device, seed, 1),
        )

    def opened(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int,
        seeds: Iterable[int],
        stop_tokens: Sequence[int] | None,
        failures: dict[int, str],
    ) -> Iterator[Row]:
        """Yield a row for each prompt as it is asked for.

        `failures` takes what is wrong with others, by their number.
        """
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=False)):
            try:
                yield self.row(number, prompt, max_new_tokens, seed, stop_tokens)
            except UserError as error:
                failures[number] = str(error)

    def generate(
        self, rows: Iterable[Row], stop_tokens: Sequence[int] | None, failures: dict[int, str]
    ) -> Iterator[tuple[int, Generation]]:
        """Yield the number of a row and its response as responses end.

        Raises UserError at the end if there are `failures`.
        """
        with _frozen_objects():
            for decoding in self.decode(rows, stop_tokens):
                for row in decoding:
                    if row.failure is not None:
                        failures[row.number] = row.failure
                    elif row.has_ended:
                        yield row.number, row.generation(self.pair)
        if failures:
            raise failed(failures)

    def decode(self, rows: Iterable[Row], stop_tokens: Iterable[int] | None) -> Iterator[list[Row]]:
        """Yield, after each round, the rows that took it.

        One that has ended leaves its place to the next of `rows`.

        Drafts end with `stop_tokens`; None: the target's generation config. Raises UserError where
        the engines' memory is in use.
        """
        if not self.is_warm:
            self.warm_up()
        with _owned(self.engines):
            if not self._single:
                for engine in self.engines:
                    engine.rewind(0)  # notices weights that were moved or changed
            ends = self._end_flags(self.pair.stop_tokens if stop_tokens is None else stop_tokens)
            waiting = iter(rows)
            decoding: list[Row] = []
            free = list(range(self.num_rows))[::-1]
            while True:
                if free and (started := list(islice(waiting, len(free)))):
                    for row in started:
                        row.place = free.pop()
                    self._start(started)
                    decoding = sorted(
                        [*decoding, *started], key=lambda row: row.place
                    )  # memory's order saves copies
                if not decoding:
                    return
                with plain_torch(), threads_by_load():
                    self._take_round(decoding, ends)
                    adapt_threads()
                yield decoding
                free += [row.place for row in decoding if row.has_ended]
                decoding = [row for row in decoding if not row.has_ended]

    @plain_torch()
    def _end_flags(self, stop_tokens: Iterable[int]) -> Tensor:
        """Return which tokens end a response, (V,) bool."""
        ends = torch.zeros(self.pair.vocab_size, dtype=torch.bool)
        ends[[token for token in stop_tokens if 0 <= token < len(ends)]] = True
        return ends.to(self.engines[-1].lm.device)

    @plain_torch()
    def _start(self, rows: Sequence[Row]) -> None:
        """Read all of the rows' prompts but their last tokens."""
        start = self._clock.mark()
        if self._single:
            for engine in self.engines:
                engine.rewind(0)
        known = [row for row in rows if len(row.committed) > 1]
        for reader, engine in zip(self.rounds.readers, self.engines, strict=False):
            read = [
                row for row in known if len(row.committed) <= engine.capacity
            ]  # the draft does without texts too long for it
            reader.read([row.place for row in read], [row.committed[:-1] for row in read])
        self.rounds.start(rows)
        started, read_at = self._clock.read(start, self._clock.mark())
        for row in rows:
            row.ready_at = read_at
            row.prefill_seconds = read_at - started

    def _take_round(self, rows: Sequence[Row], ends: Tensor) -> None:
        """Decode a round of each row and commit it, or note why a row cannot go on."""
        start = self._clock.mark()
        rounds, has_drafted = self.rounds.take(rows, ends, self._clock)
        has_verified = self._clock.mark()
        emitted: list[list[int]] = []
        for row, done in zip(rows, rounds, strict=True):
            if row.failure is not None:
                for engine in self.engines:
                    engine.clear_row(row.place)
            emitted.append([] if row.failure else row.commit(done.tokens))
            if row.has_ended:
                row.num_expected = self.rounds.num_expected(row)
        began, drafted, verified, committed = self._clock.read(
            start, has_drafted, has_verified, self._clock.mark()
        )
        for row, tokens, done in zip(rows, emitted, rounds, strict=True):
            # Before a round a row waits for the others. One that is alone waits for what its caller
            # does with its tokens.
            waited = 0.0 if self._single else began - row.ready_at
            timed = done._replace(
                tokens=tokens,
                draft_seconds=drafted
                - began,  # those of all rows, which the row waits for, as the next two
                verify_seconds=verified - drafted,
                commit_seconds=committed - verified,
                wait_seconds=waited,
            )
            row.ready_at = committed
            row.rounds.append(timed)


def _begin_in_fork() -> None:
    """Compute with one thread: a fork would wait for those of OpenMP, which only the process has
    that it was forked from.
    """
    global _lock
    _lock = Lock()
    if _used and torch.get_num_threads() > 1:
        _of_parent.update(_used)
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_begin_in_fork)


@contextmanager
def _owned(engines: Sequence[Engine]) -> Iterator[None]:
    """Keep engines for one caller: texts that take turns on one memory would be wrong without a
    word.

    Raises UserError where they are in use, were made for models of another type or on another
    device, or compiled for threads that a fork lacks.
    """
    for engine in engines:
        if engine.num_prepared and engine in _of_parent:
            raise UserError(
                "this decoder was compiled in the process that this one was forked from; make"
                " another decoder here."
            )
        if (now := engine.lm.placement) != engine.placement:
            made = f"this decoder was made when it was {engine.placement}; make another decoder"
            raise UserError(f"{engine.lm.name} is {now}, but {made}.")
    with _lock:
        if any(engine in _in_use for engine in engines):
            raise UserError(
                "this decoder is decoding already, in another thread or for a stream or a batch"
                " that is still open; read that to its end or close() it, or make another decoder."
            )
        _in_use.update(engines)
        _used.update(engines)
    try:
        yield
    finally:
        for engine in engines:
            _in_use.discard(engine)


@contextmanager
def _frozen_objects() -> Iterator[None]:
    """Keep Python's collector from walking through all objects that there are, which takes as long
    as dozens of rounds.

    Where they are frozen already they stay so. A server's are counted once, as that takes tens of
    milliseconds, too.
    """
    global _frozen_by
    if _frozen_by is None and gc.get_freeze_count():
        _frozen_by = "others"
    if _frozen_by is not None:
        yield
        return
    _frozen_by = "a batch"
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _frozen_by = None
