"""The batches of an evaluation: the reported prompts, decoded in as many rows at once as
`concurrency` says, in turns.
"""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specheads.decoding.decoder import Baseline, Decoder, SpeculativeDecoder
from specheads.decoding.engine.cuda_graph import GraphEngine
from specheads.decoding.records import DecodeStats, Generation
from specheads.evaluation.candidates import FIXED, TARGET_ALONE, Candidate
from specheads.evaluation.replayed_sets import Results
from specheads.evaluation.report import BatchRow, BatchTable, rule_fields
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import Sweep, response_seed
from specheads.forecast import progress
from specheads.replay.intervals import interval, milliseconds, resample_counts
from specheads.storage.journal import Entry, Journal

logger = logging.getLogger(__name__)

REQUESTS_PER_ROW = 2  # at least; rows then take other prompts while their neighbours decode
LONGEST_FIXED = 8  # tokens: the drafts of a batch end together, so longer ones do not pay

_Advance = Callable[[int], Any]  # is called with the number of responses that are done


@dataclass(frozen=True)
class BatchRun:
    """Requests that one setting decoded once, in the order in which they were handed in."""

    seconds: float  # the whole run: from handing in all requests to the end of the last response
    # Their seconds: from the moment that a request gets a row to its last token
    stats: Sequence[DecodeStats]
    # Each response's rounds: tokens, seconds, and the wait before
    rounds: Sequence[Sequence[Sequence[float]]]

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all requests per second of the whole run, with the reading of prompts."""
        return sum(part.num_tokens for part in self.stats) / self.seconds

    @property
    def token_seconds(self) -> np.ndarray:
        """The seconds of each emitted token of all requests."""
        tokens, seconds = np.array([numbers for response in self.rounds for numbers in response]).T
        return np.repeat(seconds / tokens, tokens.astype(np.int64))

    @property
    def first_token_seconds(self) -> list[float]:
        """The seconds from the moment that a request gets a row to its first tokens: the prompt,
        and a round.
        """
        return [
            part.prefill_seconds + rounds[0][1]
            for part, rounds in zip(self.stats, self.rounds, strict=True)
        ]


def decode_batches(setup: Setup, results: Results) -> list[BatchTable]:
    """Return for each number of rows the target alone, its best fixed length, and the best rules
    with and without a head.
    """
    evaluation = setup.settings
    decoded = setup.prompts.decoded
    prompts = [ids for _, ids in decoded.prompts]
    counts = [(size, max(len(prompts), REQUESTS_PER_ROW * size)) for size in evaluation.concurrency]
    requests = {
        size: [prompts[number % len(prompts)] for number in range(count)] for size, count in counts
    }
    for size, made in requests.items():
        how = (
            f"because {len(prompts)} prompts are too few for them: they are repeated, each time"
            " with another seed"
        )
        logger.info(
            "batches of %d: %d requests, %s",
            size,
            len(made),
            "each prompt once" if len(made) == len(prompts) else how,
        )
    fixed = sorted(
        (each for each in results.candidates if each.family == FIXED),
        key=lambda each: each.parameters["num_tokens"],
    )
    lengths = [each for each in fixed if each.parameters["num_tokens"] <= LONGEST_FIXED] or fixed[
        :1
    ]
    shared = [rule for rule in results.best_of_kinds if rule.family != FIXED]
    settings = {
        size: [TARGET_ALONE, best_fixed(setup, lengths, size), *shared] for size in requests
    }
    total = evaluation.repeats * sum(
        len(settings[size]) * len(made) for size, made in requests.items()
    )
    logger.info(
        "batches: %d responses of at most %d tokens, into %s",
        total,
        evaluation.max_new_tokens,
        setup.run_folder,
    )
    tables = []
    with progress("decoding batches", total) as advance:
        for size, made in requests.items():
            names = [setting.name for setting in settings[size]]
            journal = setup.journal(f"batches-{size}", decoded.prompts, settings=names, rows=size)
            runs = run_batches(
                Sweep(setup.pair, evaluation, setup.window),
                settings[size],
                made,
                size,
                journal,
                advance,
            )
            tables.append(
                BatchTable(size, len(made), batch_rows(settings[size], runs, decoded.groups))
            )
    return tables


def best_fixed(setup: Setup, lengths: Sequence[Candidate], size: int) -> Candidate:
    """Return the fixed length that decodes dev prompts in `size` rows with the most tokens per
    second.
    """
    dev = setup.prompts.dev.prompts
    requests = [dev[number % len(dev)][1] for number in range(REQUESTS_PER_ROW * size)]
    journal = setup.journal(
        f"batches-{size}-dev", dev, settings=[each.name for each in lengths], rows=size
    )
    logger.info(
        "batches of %d: %d responses to dev prompts choose a fixed length",
        size,
        len(lengths) * len(requests),
    )
    once = Sweep(setup.pair, setup.settings.but(repeats=1), setup.window)
    speeds = [
        runs[0].tokens_per_second for runs in run_batches(once, lengths, requests, size, journal)
    ]
    return lengths[int(np.argmax(speeds))]


def run_batches(
    sweep: Sweep,
    settings: Sequence[Candidate],
    requests: Sequence[Sequence[int]],
    size: int,
    journal: Journal,
    on_generation: _Advance = lambda count: None,
) -> list[list[BatchRun]]:
    """Decode all requests in `size` rows with every setting in turns, as often as the sweep
    repeats; journalled runs are kept.
    """
    done = journal.entries
    on_generation(len(done) * len(requests))
    decoders = (
        _ready(sweep, settings, requests, size)
        if len(done) < sweep.settings.repeats * len(settings)
        else []
    )
    runs: list[list[BatchRun]] = [[] for _ in settings]
    for repeat in range(sweep.settings.repeats):
        for turn in range(len(settings)):
            index = (turn + repeat) % len(settings)
            number = repeat * len(settings) + index
            entry = done.get(number)
            if entry is None:
                entry = _decoded(sweep, decoders[index], requests, size, repeat, on_generation)
                journal.add(number, entry)
            runs[index].append(
                BatchRun(
                    entry["seconds"],
                    [DecodeStats(**part) for part in entry["stats"]],
                    entry["rounds"],
                )
            )
    return runs


def _ready(
    sweep: Sweep, settings: Sequence[Candidate], requests: Sequence[Sequence[int]], size: int
) -> list[Decoder]:
    """Return what decodes with each setting, compiled and warm.

    Those that draft share the memory of rows.
    """
    start = time.perf_counter()
    shared = SpeculativeDecoder(
        sweep.pair, warp=sweep.settings.warp, engine=sweep.settings.engine, window=sweep.window
    )
    alone = Baseline(sweep.pair, sweep.settings.warp, sweep.settings.engine, sweep.window)
    decoders: list[Decoder] = [
        shared.with_stopping(each.live) if each.live else alone for each in settings
    ]
    # Steps for each combination of sizes that occurs
    captures = isinstance(shared.target_engine, GraphEngine)
    for decoder in decoders:
        _decoded(sweep, decoder, requests if captures else requests[:size], size, 0)
    logger.info(
        "batches of %d: ready after %.1f s, which is excluded from timings",
        size,
        time.perf_counter() - start,
    )
    return decoders


def _decoded(
    sweep: Sweep,
    decoder: Decoder,
    requests: Sequence[Sequence[int]],
    size: int,
    repeat: int,
    on_generation: _Advance = lambda count: None,
) -> Entry:
    seeds = [response_seed(sweep.settings.seed, number, repeat) for number in range(len(requests))]
    made: dict[int, Generation] = {}
    start = time.perf_counter()
    for number, generation in decoder.generate_batch(
        requests,
        max_batch=size,
        max_new_tokens=sweep.settings.max_new_tokens,
        seeds=seeds,
        as_completed=True,
    ):
        made[number] = generation
        on_generation(1)
    seconds = time.perf_counter() - start
    ordered = [made[number] for number in range(len(requests))]
    rounds = [
        [[len(each.tokens), each.seconds] for each in generation.rounds] for generation in ordered
    ]
    return {
        "seconds": seconds,
        "stats": [asdict(generation.stats) for generation in ordered],
        "rounds": rounds,
    }


def batch_rows(
    settings: Sequence[Candidate], runs: Sequence[Sequence[BatchRun]], groups: Sequence[Hashable]
) -> list[BatchRow]:
    """Return a row for every setting, the target alone first, of the runs of its repeats.

    Requests repeat prompts' groups.
    """
    resamples = resample_counts(
        [groups[number % len(groups)] for number in range(len(runs[0][0].stats))]
    )

    def row_speed(made: Sequence[BatchRun]) -> np.ndarray:
        """Return the tokens per second in a row, (R,), over all repeats."""
        numbers = [[[part.num_tokens, part.seconds] for part in run.stats] for run in made]
        tokens, seconds = np.array(numbers).sum(axis=0).T
        return (resamples @ tokens) / (resamples @ seconds)

    rows = []
    for setting, made in zip(settings, runs, strict=True):
        stats = [part for run in made for part in run.stats]
        ratios = [
            run.tokens_per_second / alone.tokens_per_second
            for run, alone in zip(made, runs[0], strict=True)
        ]
        row = BatchRow(
            name=setting.name,
            family=setting.family,
            **rule_fields(setting),
            lossless=True,
            tokens_per_second=float(np.median([run.tokens_per_second for run in made])),
            over_alone=float(np.median(ratios)),
            request_tokens_per_second=float(
                np.median([part.num_tokens / part.seconds for part in stats])
            ),
            speedup=interval(row_speed(made) / row_speed(runs[0])),
            token_ms=milliseconds(np.concatenate([run.token_seconds for run in made])),
            first_token_ms=milliseconds(np.concatenate([run.first_token_seconds for run in made])),
            tokens_per_round=DecodeStats.total(stats).block_efficiency,
        )
        rows.append(row)
    return rows
