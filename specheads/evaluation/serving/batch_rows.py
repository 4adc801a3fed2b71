"""Batches that were decoded, as rows of a report."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from specheads.decoding.records import DecodeStats
from specheads.evaluation.candidate import rule_fields
from specheads.evaluation.energy.meter import Idle
from specheads.evaluation.energy.per_token import batch_energy
from specheads.evaluation.intervals import interval, resample_counts
from specheads.evaluation.latencies import milliseconds
from specheads.evaluation.report import BatchRow
from specheads.evaluation.serving.batch_sweep import BatchRun, BatchSetting


def batch_rows(
    settings: Sequence[BatchSetting],
    runs: Sequence[Sequence[BatchRun]],
    groups: Sequence[Hashable],
    idle: Idle | None = None,
) -> list[BatchRow]:
    """Return a row for every setting; the first is the target alone.

    Args:
        runs: of each setting, one for each repeat.
        groups: the group of each prompt; requests beyond the last prompt begin again with the first.
        idle: the power of the idle machine; None where energy was not measured.
    """
    count = len(runs[0][0].stats)
    resamples = resample_counts([groups[number % len(groups)] for number in range(count)])
    alone = _row_speed(runs[0], resamples)
    rows = [
        _row(setting, made, runs[0], _row_speed(made, resamples) / alone) for setting, made in zip(settings, runs, strict=True)
    ]
    if idle is None:
        return rows
    return [replace(row, energy=batch_energy(made, runs[0], idle)) for row, made in zip(rows, runs, strict=True)]


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
        lossless=setting.lossless,
        tokens_per_second=float(np.median([run.tokens_per_second for run in runs])),
        over_alone=float(np.median(ratios)),
        request_tokens_per_second=float(np.median([part.num_tokens / part.seconds for run in runs for part in run.stats])),
        speedup=interval(speedup),
        token_ms=milliseconds(np.concatenate([run.token_seconds for run in runs])),
        first_token_ms=milliseconds(np.concatenate([run.first_token_seconds for run in runs])),
        tokens_per_round=DecodeStats.total([run.total for run in runs]).block_efficiency,
        **rule_fields(setting),
    )
