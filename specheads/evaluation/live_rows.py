"""What was decoded, as rows of a report."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from specheads.decoding.records import DecodeStats
from specheads.decoding.step_costs import StepCosts
from specheads.evaluation.candidates import FIXED
from specheads.evaluation.intervals import (
    Groups,
    Interval,
    cross_fitted_gain,
    interval,
    milliseconds,
    numbered,
    resample_counts,
    sums,
)
from specheads.evaluation.report import MEASURED, LiveRow, rule_fields
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.sweep import Measured, Setting


def live_rows(
    measured: Sequence[Measured],
    cost_table: CostTable,
    lossless: bool,
    replayed: Mapping[str, float] | None = None,
    groups: Sequence[Hashable] | None = None,
) -> list[LiveRow]:
    """Return a row for every setting that was decoded; the first setting is the target alone.

    Args:
        cost_table: the costs of rules at every ratio, the measured one among them.
        lossless: whether the sweep's verification rule is lossless.
        replayed: by setting, tokens per second from replayed counts of the same prompts.
        groups: the group of each prompt; None: each prompt is a group by itself.
    """
    resamples = resample_counts(groups or len(measured[0].stats))
    alone = sums(measured[0].stats, resamples).tokens_per_second
    plain = {
        id(decoded.setting.rule): sums(decoded.stats, resamples)
        for decoded in measured
        if decoded.setting.rule is not None and decoded.setting.verification is None
    }
    rows = []
    for decoded in measured:
        setting, other = decoded.setting, decoded.setting.verification
        row = _live_row(decoded, resamples, alone, cost_table, (replayed or {}).get(setting.name))
        row = replace(row, lossless=setting.is_lossless(lossless))
        if other:
            gain = plain[id(setting.rule)].verification_rate / sums(decoded.stats, resamples).verification_rate
            row = replace(row, efficiency_gain=interval(gain))
        rows.append(row)
    return rows


def _live_row(
    measured: Measured, resamples: np.ndarray, alone: np.ndarray, cost_table: CostTable, replayed: float | None
) -> LiveRow:
    """Return a row, as if its verification rule were lossless and the only one."""
    setting, total = measured.setting, DecodeStats.total(measured.stats)
    rates = sums(measured.stats, resamples)
    predicted, predicted_speedup = None, {}
    if setting.rule is not None:
        costs = cost_table.for_prompts(setting, len(measured.stats))
        predicted = float(predicted_speed(measured, costs, resamples)[0])
        for ratio in cost_table.costs:
            speed = predicted_speed(measured, cost_table.of(setting, ratio), resamples)
            predicted_speedup[ratio] = interval(speed / (cost_table.alone if ratio == MEASURED else 1.0))
    return LiveRow(
        name=setting.name,
        family=setting.family,
        value=setting.value,
        tokens_per_second=interval(rates.tokens_per_second),
        speedup=interval(rates.tokens_per_second / alone),
        discard_rate=interval(rates.discard_rate),
        verification_rate=interval(rates.verification_rate),
        block_efficiency=total.block_efficiency,
        acceptance_rate=total.acceptance_rate,
        milliseconds=milliseconds(measured.token_seconds),
        predicted_tokens_per_second=predicted,
        replayed_tokens_per_second=replayed,
        predicted_speedup=predicted_speedup,
        lossless=True,
        efficiency_gain=None,
        verification=setting.verification.name if setting.verification else None,
        **rule_fields(setting),
        accepted_over_expected=interval(_over_expected(measured.stats, resamples)) if total.num_expected else None,
    )


def _over_expected(stats: Sequence[DecodeStats], resamples: np.ndarray) -> np.ndarray:
    """Return accepted over expected tokens (R,) in each resample."""
    counts = np.array([[part.num_accepted, part.num_expected] for part in stats], dtype=np.float64)
    accepted, expected = (resamples @ counts).T
    return accepted / np.maximum(expected, 1e-12)


def predicted_speed(measured: Measured, costs: StepCosts | Sequence[StepCosts], resamples: np.ndarray) -> np.ndarray:
    """Return the tokens per second (R,) that costs, one for all prompts or one for each, predict from a decoded setting's counts.

    One entry for each row of `resamples` (R, P).
    """
    tokens = np.array([part.num_tokens for part in measured.stats], dtype=float)
    seconds = measured.predicted_seconds(costs) if isinstance(costs, StepCosts) else _by_prompt(measured, costs)
    return (resamples @ tokens) / (resamples @ seconds)


def _by_prompt(measured: Measured, costs: Sequence[StepCosts]) -> np.ndarray:
    """Return the seconds (P,) of each prompt, each with its own costs."""
    seconds = {cost: measured.predicted_seconds(cost) for cost in dict.fromkeys(costs)}
    return np.array([seconds[cost][prompt] for prompt, cost in enumerate(costs)])


def gain_over_fixed(
    measured: Sequence[Measured], costs_of: Callable[[Setting], StepCosts], groups: Groups | None = None
) -> Interval | None:
    """Return the head's predicted throughput over that of the best fixed length, as a ratio; None without settings of both kinds.

    `costs_of` returns the costs of a setting's rule; `groups` are those of the prompts; None: each prompt is a group by itself.
    """
    plain = [each for each in measured if each.setting.verification is None]
    families = (
        [each for each in plain if each.setting.rule_name == FIXED],
        [each for each in plain if each.setting.head is not None],
    )
    groups = len(measured[0].stats) if groups is None else groups
    if not all(families) or len(set(numbered(groups))) < 4:
        return None
    fixed, head = (
        np.array(
            [[[part.num_tokens for part in m.stats], m.predicted_seconds(costs_of(m.setting))] for m in members], dtype=float
        )
        for members in families
    )
    return cross_fitted_gain(head, fixed, groups)
