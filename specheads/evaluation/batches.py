"""The batches of an evaluation: the reported prompts, decoded in as many rows at once as
`concurrency` says, in turns.
"""

import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

import numpy as np

from specheads.decoding.decoder import Baseline, Decoder, SpeculativeDecoder
from specheads.decoding.engine.cuda_graph import GraphEngine
from specheads.decoding.records import DecodeStats
from specheads.evaluation.candidates import FIXED, TARGET_ALONE, Candidate
from specheads.evaluation.replayed_sets import Results
from specheads.evaluation.report import BatchRow, BatchTable, rule_fields
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import Sweep, response_seed
from specheads.progress import Advance, progress
from specheads.replay.intervals import interval, milliseconds, resample_counts
from specheads.storage.journal import Entry, Journal

logger = logging.getLogger(__name__)

REQUESTS_PER_ROW = 2  # at least; rows then take other prompts while their neighbours decode
LONGEST_FIXED = 8  # tokens: the drafts of a batch end together, so longer ones do not pay


@dataclass(frozen=True)
class BatchRun:
    """Requests that one setting decoded once, in the order in which they were handed in."""

    seconds: float  # the whole run: from handing in all requests to the end of the last response
    # Their seconds: from the moment that a request gets a row to its last token
    stats: Sequence[DecodeStats]
    # Each response's rounds: tokens and seconds
    rounds: Sequence[Sequence[Sequence[float]]]

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all requests per second of the whole run, with the reading of prompts."""
        return sum(part.num_tokens for part in self.stats) / self.seconds

    @property
    def token_seconds(self) -> np.ndarray:
        """The seconds of each emitted token of all requests."""
        tokens, seconds = np.array(list(chain.from_iterable(self.rounds))).T
        return np.repeat(seconds / tokens, tokens.astype(np.int64))

    @property
    def first_token_seconds(self) -> list[float]:
        """The seconds from the moment that a request gets a row to its first tokens: the prompt,
        and a round.
        """
        seconds = list[float]()
        for part, rounds in zip(self.stats, self.rounds, strict=True):
            _, first_round = rounds[0]
            seconds.append(part.prefill_seconds + first_round)
        return seconds


def decode_batches(setup: Setup, results: Results) -> list[BatchTable]:
    """Return for each number of rows the target alone, its best fixed length, and the best rules
    with and without a head.
    """
    evaluation = setup.settings
    decoded = setup.prompts.decoded
    prompts = [ids for _, ids in decoded.prompts]
    requests = dict[int, list[Sequence[int]]]()  # by the number of rows
    for size in evaluation.concurrency:
        requests[size] = _repeated(prompts, max(len(prompts), REQUESTS_PER_ROW * size))
    lengths = _lengths_to_try(results)
    shared = [rule for rule in results.best_of_kinds if rule.family != FIXED]
    settings = dict[int, list[Candidate]]()
    total = 0
    for size, made in requests.items():
        settings[size] = [TARGET_ALONE, best_fixed(setup, lengths, size), *shared]
        total += evaluation.repeats * len(settings[size]) * len(made)
    logger.info(
        "batches: %d responses of at most %d tokens, into %s",
        total,
        evaluation.max_new_tokens,
        setup.run_folder,
    )
    tables = []
    sweep = Sweep(setup.pair, evaluation, setup.window)
    with progress("decoding batches", total) as advance:
        for size, made in requests.items():
            names = [setting.name for setting in settings[size]]
            journal = setup.journal(f"batches-{size}", decoded.prompts, settings=names, rows=size)
            runs = run_batches(sweep, settings[size], made, size, journal, advance)
            rows = batch_rows(settings[size], runs, decoded.groups)
            tables.append(BatchTable(size, len(made), rows))
    return tables


def _repeated(prompts: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    return [prompts[number % len(prompts)] for number in range(count)]


def _lengths_to_try(results: Results) -> list[Candidate]:
    """Return the fixed lengths up to LONGEST_FIXED; if all are longer, the shortest one."""
    fixed = [each for each in results.candidates if each.family == FIXED]
    fixed.sort(key=lambda each: each.max_tokens)
    return [each for each in fixed if each.max_tokens <= LONGEST_FIXED] or fixed[:1]


def best_fixed(setup: Setup, lengths: Sequence[Candidate], size: int) -> Candidate:
    """Return the fixed length that decodes dev prompts in `size` rows with the most tokens per
    second.
    """
    dev = setup.prompts.dev.prompts
    requests = _repeated([ids for _, ids in dev], REQUESTS_PER_ROW * size)
    journal = setup.journal(
        f"batches-{size}-dev", dev, settings=[each.name for each in lengths], rows=size
    )
    once = Sweep(setup.pair, setup.settings.but(repeats=1), setup.window)
    speeds = list[float]()
    for (run,) in run_batches(once, lengths, requests, size, journal):
        speeds.append(run.tokens_per_second)
    return lengths[int(np.argmax(speeds))]


def run_batches(
    sweep: Sweep,
    settings: Sequence[Candidate],
    requests: Sequence[Sequence[int]],
    size: int,
    journal: Journal,
    advance: Advance = lambda count: None,
) -> list[list[BatchRun]]:
    """Decode all requests in `size` rows with every setting in turns, as often as the sweep
    repeats; journalled runs are kept.
    """
    done = journal.entries
    advance(len(done) * len(requests))
    decoders = list[Decoder]()
    if len(done) < sweep.settings.repeats * len(settings):
        decoders = _ready(sweep, settings, requests, size)
    runs: list[list[BatchRun]] = [[] for _ in settings]
    for repeat in range(sweep.settings.repeats):
        for turn in range(len(settings)):
            index = (turn + repeat) % len(settings)
            number = repeat * len(settings) + index
            entry = done.get(number)
            if entry is None:
                entry = _decoded(sweep, decoders[index], requests, size, repeat)
                journal.add(number, entry)
                advance(len(requests))
            stats = [DecodeStats(**part) for part in entry["stats"]]
            runs[index].append(BatchRun(entry["seconds"], stats, entry["rounds"]))
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
    decoders = list[Decoder]()
    for each in settings:
        decoders.append(shared.with_stopping(each.live) if each.live else alone)
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
    sweep: Sweep, decoder: Decoder, requests: Sequence[Sequence[int]], size: int, repeat: int
) -> Entry:
    """Return the seconds of a whole run, and of each request its stats and rounds."""
    seeds = [response_seed(sweep.settings.seed, number, repeat) for number in range(len(requests))]
    start = time.perf_counter()
    made = decoder.generate_batch(
        requests, max_batch=size, max_new_tokens=sweep.settings.max_new_tokens, seeds=seeds
    )
    seconds = time.perf_counter() - start
    rounds = list[list[list[float]]]()
    for response in made:
        rounds.append([[len(each.tokens), each.seconds] for each in response.rounds])
    return {"seconds": seconds, "stats": [asdict(each.stats) for each in made], "rounds": rounds}


def batch_rows(
    settings: Sequence[Candidate], runs: Sequence[Sequence[BatchRun]], groups: Sequence[Hashable]
) -> list[BatchRow]:
    """Return a row for every setting, the target alone first, of the runs of its repeats.

    Requests repeat prompts' groups.
    """
    alone = runs[0]
    num_requests = len(alone[0].stats)
    resamples = resample_counts([groups[number % len(groups)] for number in range(num_requests)])

    def row_speed(made: Sequence[BatchRun]) -> np.ndarray:
        """Return the tokens per second in a row, (R,), over all repeats."""
        numbers = np.zeros((num_requests, 2))  # tokens and seconds
        for run in made:
            numbers += [[part.num_tokens, part.seconds] for part in run.stats]
        tokens, seconds = numbers.T
        return (resamples @ tokens) / (resamples @ seconds)

    rows = []
    for setting, made in zip(settings, runs, strict=True):
        stats = list[DecodeStats]()
        speeds = list[float]()
        ratios = list[float]()
        token_seconds = list[np.ndarray]()
        first_token_seconds = list[float]()
        for run, same_repeat in zip(made, alone, strict=True):
            stats += run.stats
            speeds.append(run.tokens_per_second)
            ratios.append(run.tokens_per_second / same_repeat.tokens_per_second)
            token_seconds.append(run.token_seconds)
            first_token_seconds += run.first_token_seconds
        request_speeds = [part.num_tokens / part.seconds for part in stats]
        row = BatchRow(
            name=setting.name,
            family=setting.family,
            **rule_fields(setting),
            lossless=True,
            tokens_per_second=float(np.median(speeds)),
            over_alone=float(np.median(ratios)),
            request_tokens_per_second=float(np.median(request_speeds)),
            speedup=interval(row_speed(made) / row_speed(alone)),
            token_ms=milliseconds(np.concatenate(token_seconds)),
            first_token_ms=milliseconds(np.array(first_token_seconds)),
            tokens_per_round=DecodeStats.total(stats).block_efficiency,
        )
        rows.append(row)
    return rows
