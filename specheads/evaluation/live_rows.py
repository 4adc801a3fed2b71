"""What was decoded, as rows of a report."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from specheads.decoding.step_costs import StepCosts
from specheads.evaluation.candidates import FIXED, Candidate
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
from specheads.evaluation.report import LiveRow, rule_fields
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.sweep import Measured


def live_rows(
    measured: Sequence[Measured],
    cost_table: CostTable,
    lossless: bool,
    replayed: Mapping[str, float] | None = None,
    groups: Sequence[Hashable] | None = None,
) -> list[LiveRow]:
    """Return a row for every setting that was decoded; the first setting is the target alone.

    `lossless` is said of the sweep's verification; `replayed` are tokens per second from counts of the same prompts, by setting.
    """
    resamples = resample_counts(groups or len(measured[0].stats))
    totals = [sums(each.stats, resamples) for each in measured]
    alone = totals[0].tokens_per_second
    plain = {
        id(each.setting.live): total for each, total in zip(measured, totals, strict=True) if each.setting.verification is None
    }
    rows = []
    for each, total in zip(measured, totals, strict=True):
        setting, other, predicted = each.setting, each.setting.verification, None
        if setting.live is not None:
            halves = cost_table.for_prompts(setting, len(each.stats))
            predicted = _predicted_speed(each, halves)
        expected = [part.num_expected for part in each.stats]
        known = None not in expected and any(expected)
        row = LiveRow(
            name=setting.name,
            family=setting.family,
            value=setting.value,
            tokens_per_second=interval(total.tokens_per_second),
            speedup=interval(total.tokens_per_second / alone),
            **total.rates(),
            milliseconds=milliseconds(each.token_seconds),
            predicted_tokens_per_second=predicted,
            replayed_tokens_per_second=(replayed or {}).get(setting.name),
            lossless=setting.live is None or (other.lossless if other else lossless),
            efficiency_gain=interval(plain[id(setting.live)].verification_rate / total.verification_rate) if other else None,
            verification=other.name if other else None,
            **rule_fields(setting),
            accepted_over_expected=_ratio([part.num_accepted for part in each.stats], expected, resamples) if known else None,
        )
        rows.append(row)
    return rows


def _predicted_speed(measured: Measured, costs: Sequence[StepCosts]) -> float:
    """Return the tokens per second that costs, one for each prompt, predict from a decoded setting's counts."""
    seconds = {cost: measured.predicted_seconds(cost) for cost in dict.fromkeys(costs)}
    by_prompt = [float(seconds[cost][prompt]) for prompt, cost in enumerate(costs)]
    return sum(part.num_tokens for part in measured.stats) / sum(by_prompt)


def gain_over_fixed(measured: Sequence[Measured], costs_of: Callable[[Candidate], StepCosts], groups: Groups) -> Interval | None:
    """Return the predicted throughput with a head over that of the best fixed length, a ratio; None unless both were decoded."""
    families: list[list[Any]] = [[], []]  # fixed lengths and heads: the tokens and seconds of each prompt
    for each in measured:
        setting = each.setting
        if setting.verification is None and (setting.rule_name == FIXED or setting.head is not None):
            numbers = [part.num_tokens for part in each.stats], each.predicted_seconds(costs_of(setting))
            families[setting.head is not None].append(numbers)
    if not all(families) or len(set(numbered(groups))) < 4:
        return None
    fixed, head = (np.array(family, dtype=float) for family in families)
    return cross_fitted_gain(head, fixed, groups)


def _ratio(over: Sequence[float] | np.ndarray, under: Any, resamples: np.ndarray) -> Interval:
    """Return a ratio of sums over prompts, of columns (P,); 0 in resamples where both are 0."""
    return interval((resamples @ np.asarray(over)) / np.maximum(resamples @ np.asarray(under), 1e-12))
