"""The batches of an evaluation: the reported prompts, decoded in as many rows at once as `concurrency` says.

Fixed lengths and policies on the load are chosen and fitted on a recording of dev prompts.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.load_aware import MAX_TOKENS, LengthPolicy, LoadCosts
from specheads.decoding.load_costs import kept_costs
from specheads.decoding.records import DecodeStats
from specheads.decoding.stopping import FixedLength
from specheads.evaluation.batch_sweep import ALONE, BatchRun, BatchSetting, BatchSweep, num_requests
from specheads.evaluation.candidates import DEFAULT, FIXED, LOAD_AWARE, Policies
from specheads.evaluation.decode import best_of_kinds, open_journal, window_of
from specheads.evaluation.intervals import interval, milliseconds, resample_counts
from specheads.evaluation.prompt_sets import PromptSet
from specheads.evaluation.replayed_sets import Outcome
from specheads.evaluation.report import BatchRow, BatchTable, rule_fields
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup
from specheads.forecast import progress
from specheads.replay.recording import Recording
from specheads.replay.replay import replay
from specheads.storage.runs import is_resumed

logger = logging.getLogger(__name__)


def decode_batches(setup: Setup[Evaluation], outcome: Outcome) -> list[BatchTable]:
    """Return a table for every number of rows.

    Each has the target alone, the best fixed length for this size, the best rules with and without a head, and the policies that
    know the load. Fixed lengths and policies are chosen and fitted on dev prompts at the measured costs of steps in rows.
    """
    evaluation = setup.settings
    prompts = setup.prompts.decoded(evaluation.num_live_prompts)
    sizes = list(dict.fromkeys(evaluation.concurrency))
    lengths = [candidate.rule.max_tokens for candidate in outcome.candidates if candidate.family == FIXED]
    counts = {size: num_requests(len(prompts.prompts), size) for size in sizes}
    for size, count in counts.items():
        logger.info("batches of %d: %d requests, %s", size, count, _repeated(count, len(prompts.prompts)))
    assert outcome.choices is not None  # rules were replayed
    rules = [rule for rule in best_of_kinds(outcome.choices) if rule.family != FIXED]
    dev = outcome.recorded[0].recording
    policies = evaluation.policies or DEFAULT
    longest = max(choice.arguments.get("max_tokens", MAX_TOKENS) for choice in policies.values())
    costs = _costs(setup, max(sizes), max(*lengths, longest))
    plain = [BatchSetting(rule.name, rule.family, rule.live, **rule_fields(rule)) for rule in rules]
    by_load = load_settings(policies, dev, costs)
    settings = {size: [ALONE, best_fixed(dev, costs, lengths, size), *plain, *by_load] for size in sizes}
    total = evaluation.repeats * sum(len(settings[size]) * count for size, count in counts.items())
    logger.info("batches: %d responses of at most %d tokens, into %s", total, evaluation.max_new_tokens, setup.run_folder)
    with progress("decoding batches", total) as advance:
        return [_table(setup, settings[size], prompts, size, costs, advance) for size in sizes]


def best_fixed(dev: Recording, costs: LoadCosts, lengths: Sequence[int], size: int) -> BatchSetting:
    """Return the fixed length with the most tokens per second of `size` rows, as replayed on dev prompts, at these costs."""
    rounds = [replayed.per_prompt(dev.num_prompts) for replayed in replay(dev, [FixedLength(length) for length in lengths])]
    emitted = [counts.tokens.sum() / counts.target_calls.sum() for counts in rounds]
    middle = np.mean([len(prompt) for prompt in dev.prompts]) + float(dev.lengths.double().mean()) / 2  # positions of a row
    speeds = {
        length: tokens / costs.round_seconds(size, length, round(size * middle))
        for length, tokens in zip(lengths, emitted, strict=True)
    }
    length = max(speeds, key=lambda each: speeds[each])
    return BatchSetting(f"fixed K={length}", FIXED, FixedLength(length), rule_name=FIXED)


def survival(dev: Recording, max_tokens: int) -> list[float]:
    """Return the probability that the first 1, 2, ... tokens of a draft are all accepted, as replayed on dev prompts."""
    max_tokens = min(max_tokens, dev.max_tokens)
    (rounds,) = replay(dev, [FixedLength(max_tokens)])
    places = np.arange(max_tokens)
    accepted = (rounds.accepted[:, None] > places).sum(axis=0)
    reached = ((rounds.accepted[:, None] >= places) & (rounds.drafted[:, None] > places)).sum(axis=0)
    return (accepted / np.maximum(reached, 1)).cumprod().tolist()


def load_settings(policies: Policies, dev: Recording, costs: LoadCosts) -> list[BatchSetting]:
    """Return the settings that know the load, by the names of their policies."""
    settings = []
    for name, choice in policies.items():
        longest = choice.arguments.get("max_tokens", MAX_TOKENS)
        policy: LengthPolicy = choice.cls(costs=costs, survival=survival(dev, longest), **choice.arguments)
        title = name.replace("_", "-")
        settings.append(BatchSetting(title, LOAD_AWARE, policy=policy, rule_name=name))
    return settings


def _repeated(count: int, num_prompts: int) -> str:
    """Return how prompts become requests."""
    if count == num_prompts:
        return "each prompt once"
    return f"because {num_prompts} prompts are too few for them: they are repeated, each time with another seed"


def _costs(setup: Setup[Evaluation], max_batch: int, max_tokens: int) -> LoadCosts:
    """Return what rounds cost here, as this run first took it: a resumed run must not choose other settings."""
    path, settings = setup.run_folder / "batch-costs.json", setup.settings
    if not (is_resumed(setup.run_folder) and path.is_file()):
        decoder = SpeculativeDecoder(
            setup.pair,
            verification=settings.verification,
            warp=settings.warp,
            engine=settings.engine,
            window=window_of(setup),
        )
        kept_costs(decoder, max_batch, max_tokens).write(path)
    return LoadCosts.read(path)


def _table(
    setup: Setup[Evaluation],
    settings: Sequence[BatchSetting],
    prompts: PromptSet,
    size: int,
    costs: LoadCosts,
    advance: Callable[[int], Any],
) -> BatchTable:
    evaluation = setup.settings
    policies = [setting.policy and setting.policy.max_tokens for setting in settings]
    decided = {"settings": [setting.name for setting in settings], "longest": policies, "rows": size, "costs": asdict(costs)}
    journal = open_journal(setup, f"batches-{size}", decided, prompts.prompts)
    sweep = BatchSweep(
        setup.pair,
        evaluation.warp,
        evaluation.max_new_tokens,
        size,
        evaluation.repeats,
        evaluation.seed,
        evaluation.engine,
        window=window_of(setup),
    )
    runs = sweep.run(settings, [ids for _, ids in prompts.prompts], journal, advance)
    count = num_requests(len(prompts.prompts), size)
    return BatchTable(size, count, batch_rows(settings, runs, prompts.groups))


def batch_rows(
    settings: Sequence[BatchSetting],
    runs: Sequence[Sequence[BatchRun]],
    groups: Sequence[Hashable],
) -> list[BatchRow]:
    """Return a row for every setting; the first is the target alone.

    Args:
        runs: of each setting, one for each repeat.
        groups: the group of each prompt; requests beyond the last prompt begin again with the first.
    """
    count = len(runs[0][0].stats)
    resamples = resample_counts([groups[number % len(groups)] for number in range(count)])
    alone = _row_speed(runs[0], resamples)
    return [
        _row(setting, made, runs[0], _row_speed(made, resamples) / alone) for setting, made in zip(settings, runs, strict=True)
    ]


def _row_speed(runs: Sequence[BatchRun], resamples: np.ndarray) -> np.ndarray:
    """Return the tokens per second in a row, (R,), under each row of `resamples` (R, n)."""
    tokens, seconds = (
        np.array([[getattr(part, name) for part in run.stats] for run in runs]).sum(axis=0) for name in ("num_tokens", "seconds")
    )
    return (resamples @ tokens) / (resamples @ seconds)


def _row(setting: BatchSetting, runs: Sequence[BatchRun], alone: Sequence[BatchRun], speedup: np.ndarray) -> BatchRow:
    ratios = [run.tokens_per_second / other.tokens_per_second for run, other in zip(runs, alone, strict=True)]
    return BatchRow(
        name=setting.name,
        family=setting.family,
        **rule_fields(setting),
        lossless=True,
        tokens_per_second=float(np.median([run.tokens_per_second for run in runs])),
        over_alone=float(np.median(ratios)),
        request_tokens_per_second=float(np.median([part.num_tokens / part.seconds for run in runs for part in run.stats])),
        speedup=interval(speedup),
        token_ms=milliseconds(np.concatenate([run.token_seconds for run in runs])),
        first_token_ms=milliseconds(np.concatenate([run.first_token_seconds for run in runs])),
        tokens_per_round=DecodeStats.total([run.total for run in runs]).block_efficiency,
    )
