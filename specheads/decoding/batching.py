"""Continuous batching: requests take the rows of a batch, take rounds together, and commit what a
round brought, until their responses end. One request is a batch of one.

Each request has separate uniform numbers, states of the rules and a length, so its tokens do not
depend on its neighbours, up to the rounding of sums. examples/speculative_decoding.py is the
algorithm without caches.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from threading import Lock
from weakref import WeakSet

import torch
from torch import Tensor

from specheads.decoding.engine import Engine, compile_ahead
from specheads.decoding.records import Clock, DecodeStats, Generation
from specheads.decoding.request import Prompt, Request, checked_number
from specheads.decoding.rounds import ChainRounds, Rounds
from specheads.errors import UserError
from specheads.load import adapt_threads, threads_by_load
from specheads.pair.pair import Pair
from specheads.pair.sampling import Uniforms

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
MOST_NAMED = 8  # prompts that failed, in a message


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


class BatchDecoder:
    """Decodes requests in the rows of a batch; one whose response has ended makes room for the
    next.
    """

    def __init__(self, pair: Pair, rounds: Rounds) -> None:
        self.pair = pair
        self.rounds = rounds
        self.engines = rounds.engines
        self._target = self.engines.target
        self._draft = self.engines.draft
        # Engines of one row keep its length; others have a spare row that fills steps up.
        self._single = self._target.num_rows == 1
        self.num_rows = max(1, self._target.num_rows - 1)
        if not self._single:
            size = sum(engine.memory_bytes for engine in self.engines)
            of_row = size / self._target.num_rows / 2**20
            logger.info("a batch of %d: %.1f MiB of KV cache for each row", self.num_rows, of_row)
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
        with _reserved(self.engines):
            for reader in self.rounds.readers:
                reader.warm_up()
            self.rounds.warm_up(self._end_tokens(()))

    @plain_torch()
    def prepare_repeated(self, verified: Sequence[int]) -> None:
        """Prepare only what `ChainRounds.warm_up_repeated` says.

        Raises UserError as `warm_up`.
        """
        assert isinstance(self.rounds, ChainRounds)
        with _reserved(self.engines):
            self.rounds.warm_up_repeated(self._end_tokens(()), verified)

    @plain_torch()
    def request(
        self,
        number: int,
        prompt: Prompt,
        max_new_tokens: int,
        seed: int,
        stop_tokens: Iterable[int] | None,
        verify_uniforms: Uniforms | None = None,
    ) -> Request:
        """Encode a prompt; nothing is read yet.

        Raises UserError for one that does not fit into memory.
        """
        max_new_tokens = checked_number("max_new_tokens", max_new_tokens)
        seed = checked_number("seed", seed, 0)
        committed = self.pair.encode(prompt).tolist()
        window = self._target.capacity
        if len(committed) >= window:
            raise UserError(
                f"the prompt has {len(committed)} tokens, but the decoder has memory for {window};"
                " give it a larger window=."
            )
        # Steps over several rows take their numbers from the host.
        draft_device = self._draft.lm.device if self._single else CPU
        target_device = self._target.lm.device if self._single else CPU
        return Request(
            number=number,
            committed=committed,
            prompt_length=len(committed),
            limit=min(len(committed) + max_new_tokens, window),
            draft_limit=self._draft.capacity,
            num_skipped=self._draft.lm.num_skipped,
            max_new_tokens=max_new_tokens,
            stop_tokens=self.pair.stop_tokens if stop_tokens is None else frozenset(stop_tokens),
            draft_uniforms=Uniforms(draft_device, seed, 0),
            verify_uniforms=verify_uniforms or Uniforms(target_device, seed, 1),
        )

    def requests(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int,
        seeds: Iterable[int],
        stop_tokens: Sequence[int] | None,
        failures: dict[int, str],
    ) -> Iterator[Request]:
        """Yield a request for each prompt, lazily.

        `failures` takes what is wrong with others, by their number.
        """
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=False)):
            try:
                yield self.request(number, prompt, max_new_tokens, seed, stop_tokens)
            except UserError as error:
                failures[number] = str(error)

    def generate(
        self,
        requests: Iterable[Request],
        stop_tokens: Sequence[int] | None,
        failures: dict[int, str],
    ) -> Iterator[tuple[int, Generation]]:
        """Yield the number of a request and its response as responses end.

        Raises UserError at the end if there are `failures`.
        """
        for decoding in self.decode(requests, stop_tokens):
            for request in decoding:
                if request.failure is not None:
                    failures[request.number] = request.failure
                elif request.has_ended:
                    yield request.number, self.generation(request)
        if failures:
            raise failed(failures)

    def decode(
        self, requests: Iterable[Request], stop_tokens: Iterable[int] | None
    ) -> Iterator[list[Request]]:
        """Yield, after each round, the requests that took it.

        One that has ended leaves its row to the next of `requests`. Drafts end with `stop_tokens`;
        None: the target's generation config. Raises UserError where the engines' memory is in use.
        """
        if not self.is_warm:
            self.warm_up()
        with _reserved(self.engines):
            if not self._single:
                for engine in self.engines:
                    engine.rewind(0)  # notices weights that were moved or changed
            end_tokens = self._end_tokens(
                self.pair.stop_tokens if stop_tokens is None else stop_tokens
            )
            waiting = iter(requests)
            decoding: list[Request] = []
            free = list(range(self.num_rows))[::-1]
            while True:
                started = list(islice(waiting, len(free)))
                if started:
                    for request in started:
                        request.row = free.pop()
                    self._start(started)
                    decoding += started
                    decoding.sort(key=lambda request: request.row)  # memory's order saves copies
                if not decoding:
                    return
                with plain_torch(), threads_by_load():
                    self._take_round(decoding, end_tokens)
                    adapt_threads()
                yield decoding
                free += [request.row for request in decoding if request.has_ended]
                decoding = [request for request in decoding if not request.has_ended]

    @plain_torch()
    def generation(self, request: Request) -> Generation:
        """Return the record of a response that has ended; raises UserError for one that failed."""
        if request.failure is not None:
            raise UserError(request.failure)
        if request.finish_reason is None:
            raise RuntimeError("the response has not ended")
        tokens = torch.tensor(request.response)
        return Generation(
            prompt_ids=torch.tensor(request.committed[: request.prompt_length]),
            tokens=tokens,
            text=self.pair.decode(tokens),
            rounds=request.rounds,
            stats=DecodeStats.of(request.rounds, request.prefill_seconds, request.num_expected),
            finish_reason=request.finish_reason,
        )

    @plain_torch()
    def _end_tokens(self, stop_tokens: Iterable[int]) -> Tensor:
        """Return which tokens end a response, (V,) bool."""
        is_end = torch.zeros(self.pair.vocab_size, dtype=torch.bool)
        is_end[[token for token in stop_tokens if 0 <= token < len(is_end)]] = True
        return is_end.to(self._draft.lm.device)

    @plain_torch()
    def _start(self, requests: Sequence[Request]) -> None:
        """Read all of the prompts but their last tokens."""
        start = self._clock.mark()
        if self._single:
            for engine in self.engines:
                engine.rewind(0)
        for reader, engine in zip(self.rounds.readers, self.engines, strict=False):
            read = []
            for request in requests:  # the draft does without texts too long for it
                if 1 < len(request.committed) <= engine.capacity:
                    read.append(request)
            rows = [request.row for request in read]
            reader.read(rows, [request.committed for request in read])
        self.rounds.start(requests)
        started_at, read_at = self._clock.read(start, self._clock.mark())
        for request in requests:
            request.ready_at = read_at
            request.prefill_seconds = read_at - started_at

    def _take_round(self, requests: Sequence[Request], end_tokens: Tensor) -> None:
        """Decode a round of each request and commit it, or note why one cannot go on."""
        start = self._clock.mark()
        rounds, has_drafted = self.rounds.take(requests, end_tokens, self._clock)
        has_verified = self._clock.mark()
        emitted: list[list[int]] = []
        for request, done in zip(requests, rounds, strict=True):
            if request.failure is None:
                emitted.append(request.commit(done.tokens))
            else:
                emitted.append([])
                for engine in self.engines:
                    engine.clear_row(request.row)
            if request.has_ended:
                request.num_expected = self.rounds.num_expected(request)
        began, drafted, verified, committed = self._clock.read(
            start, has_drafted, has_verified, self._clock.mark()
        )
        for request, tokens, done in zip(requests, emitted, rounds, strict=True):
            # Seconds are those of all rows, which a request waits for. Before a round it waits for
            # the others; one that is alone waits for what its caller does with its tokens.
            timed = done._replace(
                tokens=tokens,
                draft_seconds=drafted - began,
                verify_seconds=verified - drafted,
                commit_seconds=committed - verified,
                wait_seconds=0.0 if self._single else began - request.ready_at,
            )
            request.ready_at = committed
            request.rounds.append(timed)


def failed(failures: Mapping[int, str]) -> UserError:
    """Return the error about prompts that failed, by their number."""
    named = [f"prompt {number}: {failure}" for number, failure in sorted(failures.items())]
    if len(named) > MOST_NAMED:
        named[MOST_NAMED:] = [f"and {len(named) - MOST_NAMED} more"]
    return UserError("; ".join(named))


_in_use = WeakSet[Engine]()  # engines that decode now
_has_decoded = False  # in this process, or in the one that it was forked from
_lock = Lock()


def _begin_in_fork() -> None:
    """Compute with one thread: a fork would wait for those of OpenMP, which only the process has
    that it was forked from.
    """
    global _lock
    _lock = Lock()
    if _has_decoded:
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_begin_in_fork)


@contextmanager
def _reserved(engines: Sequence[Engine]) -> Iterator[None]:
    """Keep engines for one caller: texts that alternate on one memory would be silently wrong.

    Raises UserError where they are in use, were made for models of another type or on another
    device, or compiled for threads that a fork lacks.
    """
    global _has_decoded
    for engine in engines:
        if engine.num_prepared and engine.process != os.getpid():
            raise UserError(
                "this decoder was compiled in the process that this one was forked from; make"
                " another decoder here."
            )
        now = engine.lm.placement
        if now != engine.placement:
            made = f"this decoder was made when it was {engine.placement}; make another decoder"
            raise UserError(f"{engine.lm.name} is {now}, but {made}.")
    with _lock:
        if any(engine in _in_use for engine in engines):
            raise UserError(
                "this decoder is decoding already, in another thread or for a stream or a batch"
                " that is still open; read that to its end or close() it, or make another decoder."
            )
        _in_use.update(engines)
        _has_decoded = True
    try:
        yield
    finally:
        for engine in engines:
            _in_use.discard(engine)
