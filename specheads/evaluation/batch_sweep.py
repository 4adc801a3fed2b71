"""Decode the same prompts in batches of one size with many settings, interleaved, so that a slow minute slows all of them."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from specheads.decoding.decoder import Baseline, SpeculativeDecoder
from specheads.decoding.engine.cuda_graph import GraphEngine
from specheads.decoding.load_aware import LengthPolicy
from specheads.decoding.records import DecodeStats, Generation
from specheads.decoding.stopping import StoppingRule
from specheads.evaluation.candidates import TARGET
from specheads.evaluation.intervals import token_seconds
from specheads.evaluation.report import RuleFields
from specheads.evaluation.sweep import response_seed
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.storage.journal import Entry, Journal

logger = logging.getLogger(__name__)

REQUESTS_PER_ROW = 2  # at least, so that rows take other prompts while their neighbours decode

DecodeBatch = Callable[..., Iterator[tuple[int, Generation]]]  # of prompts, rows, longest response, seeds, stop tokens


@dataclass(frozen=True)
class BatchSetting(RuleFields):
    """How batches are decoded: by the target alone, or with a stopping rule or a policy on the load."""

    name: str
    family: str
    rule: StoppingRule | None = None
    policy: LengthPolicy | None = None


ALONE = BatchSetting("target alone", TARGET)


@dataclass(frozen=True)
class BatchRun:
    """Requests that one setting decoded once, in the order in which they were handed in."""

    seconds: float  # of the whole run: from handing in all requests to the end of the last response
    stats: Sequence[DecodeStats]  # their seconds: from the moment that a request gets a row to its last token
    rounds: Sequence[Sequence[Sequence[float]]]  # by response: tokens and seconds of rounds, with the wait before

    @classmethod
    def of(cls, entry: Entry) -> "BatchRun":
        """Return the run that a journal holds."""
        return cls(entry["seconds"], [DecodeStats(**part) for part in entry["stats"]], entry["rounds"])

    @cached_property
    def total(self) -> DecodeStats:
        """The counts of all requests."""
        return DecodeStats.total(self.stats)

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all requests per second of the whole run, with the reading of prompts."""
        return self.total.num_tokens / self.seconds

    @property
    def token_seconds(self) -> np.ndarray:
        """The seconds of each emitted token of all requests."""
        return token_seconds(*np.array([numbers for response in self.rounds for numbers in response]).T)

    @property
    def first_token_seconds(self) -> np.ndarray:
        """The seconds (n,) from the moment that a request gets a row to its first tokens: the prompt, and a round."""
        first = [response[0][1] for response in self.rounds]
        return np.array([part.prefill_seconds for part in self.stats]) + np.array(first)


@dataclass(frozen=True)
class BatchSweep:
    """How batches are decoded, the same for all settings."""

    pair: Pair
    warp: Warp
    max_new_tokens: int
    size: int  # rows
    repeats: int = 1  # of all requests, each with other seeds, which all settings share
    seed: int = 0
    engine: str = "auto"
    stop_tokens: Sequence[int] | None = None  # that end a response; None: the target's
    window: int | None = None  # positions of each row's memory; None: those that both models reach

    def run(
        self,
        settings: Sequence[BatchSetting],
        prompts: Sequence[Sequence[int]],
        journal: Journal | None = None,
        on_generation: Callable[[int], Any] = lambda count: None,
    ) -> list[list[BatchRun]]:
        """Decode all requests (see `num_requests`) `repeats` times with every setting; return the runs of each setting.

        The order of settings rotates from repeat to repeat. Every setting first decodes the requests of a full batch that are
        not counted, for compilation; where steps are captured for each combination of sizes, it decodes all requests once. Runs
        that are in the journal are not made again.

        Args:
            on_generation: called with the number of responses that are done.
        """
        requests = [prompts[number % len(prompts)] for number in range(num_requests(len(prompts), self.size))]
        done = {} if journal is None else journal.entries
        on_generation(len(done) * len(requests))
        decoders = self._ready(settings, requests) if len(done) < self.repeats * len(settings) else []
        runs: list[list[BatchRun]] = [[] for _ in settings]
        for repeat in range(self.repeats):
            for turn in range(len(settings)):
                index = (turn + repeat) % len(settings)
                number = repeat * len(settings) + index
                entry = done.get(number)
                if entry is None:
                    entry = self._decoded(decoders[index], requests, repeat, on_generation)
                    if journal is not None:
                        journal.add(number, entry)
                runs[index].append(BatchRun.of(entry))
        return runs

    def _ready(self, settings: Sequence[BatchSetting], requests: Sequence[Sequence[int]]) -> list[DecodeBatch]:
        """Return what decodes with each setting, compiled and warm; those that draft share the memory of rows."""
        start = time.perf_counter()
        shared = SpeculativeDecoder(self.pair, warp=self.warp, engine=self.engine, window=self.window)
        alone = Baseline(self.pair, self.warp, self.engine, self.window)

        def decoder_of(setting: BatchSetting) -> DecodeBatch:
            if setting.policy is not None:
                return partial(shared.generate_batch, policy=setting.policy)
            return alone.generate_batch if setting.rule is None else shared.with_stopping(setting.rule).generate_batch

        decoders = [decoder_of(setting) for setting in settings]
        captures = isinstance(shared.target_engine, GraphEngine)
        for decode in decoders:
            self._decoded(decode, requests if captures else requests[: self.size], 0)
        logger.info("batches of %d: ready after %.1f s, which no figure contains", self.size, time.perf_counter() - start)
        return decoders

    def _decoded(
        self,
        decode: DecodeBatch,
        requests: Sequence[Sequence[int]],
        repeat: int,
        on_generation: Callable[[int], Any] = lambda count: None,
    ) -> Entry:
        """Return a run as a journal holds it."""
        seeds = [response_seed(self.seed, number, repeat) for number in range(len(requests))]
        generations: dict[int, Generation] = {}
        start = time.perf_counter()
        for number, generation in decode(requests, self.size, self.max_new_tokens, seeds, self.stop_tokens):
            generations[number] = generation
            on_generation(1)
        seconds = time.perf_counter() - start
        ordered = [generations[number] for number in range(len(requests))]
        rounds = [[[len(made.tokens), made.seconds] for made in generation.rounds] for generation in ordered]
        return {"seconds": seconds, "stats": [asdict(generation.stats) for generation in ordered], "rounds": rounds}


def num_requests(num_prompts: int, size: int) -> int:
    """Return how many requests a batch of `size` rows decodes: every prompt, and again from the first if those are too few."""
    return max(num_prompts, REQUESTS_PER_ROW * size)
