"""The energy of responses, by their emitted tokens."""

from collections.abc import Sequence

import numpy as np

from specheads.evaluation.batch_sweep import BatchRun
from specheads.evaluation.energy.meter import Energy, Idle, resolution_error
from specheads.evaluation.intervals import interval
from specheads.evaluation.report import BatchEnergy, EnergyRow
from specheads.evaluation.sweep import Measured


def energy_row(measured: Measured, alone: Measured, resamples: np.ndarray, idle: Idle) -> EnergyRow:
    """Return the energy of one setting, with that of the target alone for the ratio.

    Args:
        resamples: (R, P), how often each prompt is in each resample.
    """
    (joules, seconds), num_tokens = _sums(measured, resamples)
    (of_alone, _), tokens_alone = _sums(alone, resamples)
    num_responses = sum(map(len, measured.energy))
    return EnergyRow(
        joules_per_token=interval(joules / num_tokens),
        above_idle=interval((joules - idle.watts * seconds) / num_tokens),
        over_alone=interval((joules / num_tokens) / (of_alone / tokens_alone)),
        resolution_error=resolution_error(idle.update_seconds, num_responses, float(seconds[0])),
    )


def batch_energy(runs: Sequence[BatchRun], alone: Sequence[BatchRun], idle: Idle) -> BatchEnergy:
    """Return the energy of the runs of one setting, with those of the target alone for the ratio."""
    energy, num_tokens = _totals(runs)
    of_alone, tokens_alone = _totals(alone)
    per_token = energy.joules / num_tokens
    return BatchEnergy(
        joules_per_token=per_token,
        above_idle=per_token - idle.watts * energy.seconds / num_tokens,
        over_alone=per_token / (of_alone.joules / tokens_alone),
        resolution_error=resolution_error(idle.update_seconds, len(runs), energy.seconds),
    )


def _totals(runs: Sequence[BatchRun]) -> tuple[Energy, int]:
    """Return the energy and the tokens of all runs."""
    measured = [run.energy for run in runs if run.energy is not None]
    return Energy(*map(sum, zip(*measured, strict=True))), sum(run.total.num_tokens for run in runs)


def _sums(measured: Measured, resamples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return joules and seconds (2, R) and tokens (R,) under each row of `resamples`."""
    energy = np.array([np.sum(responses, axis=0) for responses in measured.energy])
    return (resamples @ energy).T, resamples @ np.array([part.num_tokens for part in measured.stats])
