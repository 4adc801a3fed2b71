"""Which setting to use: the simplest that no other one is clearly faster than on dev prompts.

Settings are of kinds, the simplest first: the target alone, a fixed length, a rule without a head,
a head. A faster setting of a later kind is used where its advantage is more than the luck of the
best of so many; else it is a tie, and the simpler one is used.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TypeVar

import numpy as np

from specheads.evaluation.candidates import FIXED, TARGET, TARGET_ALONE, Candidate
from specheads.evaluation.keys import MEASURED, Kind
from specheads.evaluation.report import (
    Answer,
    ComparedSetting,
    Comparison,
    DataSet,
    Evidence,
    LiveRow,
    Report,
    Winner,
)
from specheads.replay.intervals import Interval, is_clearly_faster

# The probability with which chance alone may make the best of some settings clearly faster than
# another one
BY_CHANCE = 0.05
PREFERRED = "10"  # ratio to begin with where none was measured

Row = TypeVar("Row", LiveRow, Winner)
Fastest = Mapping[Kind, Winner] | Mapping[Kind, LiveRow]  # see `fastest_by_kind`


def kind_of(row: LiveRow | Winner | Candidate) -> Kind:
    """Return what a setting is, for a reader who chooses."""
    if row.family == TARGET:
        return Kind.ALONE
    if row.rule_name == FIXED:
        return Kind.FIXED
    return Kind.HEADLESS if row.head is None else Kind.HEAD


def setting_to_use(speeds: Mapping[str, np.ndarray], kinds: Mapping[str, Kind]) -> str:
    """Return the fastest setting of the simplest kinds that no more complex one is clearly faster
    than.

    Args:
        speeds: by setting its speed-ups (1 + R,) on dev prompts, resampled alike, the estimate
            first; those of the target alone among them.
        kinds: those of the settings.
    """
    simpler = list[str]()
    best = TARGET_ALONE.name
    for kind in Kind:
        simpler += [name for name in speeds if kinds[name] == kind]
        best = max(simpler, key=lambda name: speeds[name][0])
        over_best = [speeds[name] / speeds[best] for name in speeds if name not in simpler]
        if not over_best or not _clearly_faster(over_best):
            return best
    return best


def _clearly_faster(ratios: Sequence[np.ndarray]) -> bool:
    """Whether the largest ratio of speeds (1 + R,) is above 1 by more than the largest of so many
    is by chance (White 2000).
    """
    gains = np.log(ratios)
    best = gains[:, 0].argmax()
    # Else the settings that are least known would decide
    gains /= np.maximum(gains[:, 1:].std(axis=1, keepdims=True), 1e-9)
    return bool(np.mean((gains[:, 1:] - gains[:, :1]).max(axis=0) >= gains[best, 0]) <= BY_CHANCE)


def ratios_of(report: Report) -> list[str]:
    """Return every ratio that has predictions, the measured one first."""
    ratios = set[str]()
    for data_set in report.data_sets:
        ratios |= {row.ratio for row in data_set.winners}
        for row in data_set.rules:
            ratios |= row.speedup.keys()
    return sorted(ratios, key=lambda ratio: -inf if ratio == MEASURED else float(ratio))


def preferred(ratios: Sequence[str]) -> str | None:
    """Return which of `ratios_of` a reader sees first: the measured one where there is one."""
    return PREFERRED if PREFERRED in ratios and MEASURED not in ratios else next(iter(ratios), None)


def main_data_set(report: Report) -> int | None:
    """Return which data set a reader sees first: the first of test prompts, else the first of
    all.
    """
    for number, data_set in enumerate(report.data_sets):
        if data_set.role == "test":
            return number
    return 0 if report.data_sets else None


def winners_at(data_set: DataSet, ratio: str | None) -> list[Winner]:
    """Return the winners at a ratio: those that a decoder could use, the fastest first, then the
    bounds.
    """
    winners = [row for row in data_set.winners if row.ratio == ratio]
    return sorted(winners, key=lambda row: (row.bound, -row.speedup.value))


def dev_speed(row: LiveRow | Winner) -> float:
    """Return a setting's speed-up on dev prompts; of one that was only decoded, on these."""
    return row.dev_speedup if isinstance(row, Winner) else row.speedup.value


def fastest_by_kind(rows: Iterable[Row]) -> dict[Kind, Row]:
    """Return the setting of each kind that was the fastest on dev prompts, the fastest of all
    first; bounds are left out.
    """
    found = dict[Kind, Row]()
    for row in sorted(rows, key=dev_speed, reverse=True):
        is_usable = row.lossless if isinstance(row, LiveRow) else not row.bound
        if is_usable:
            found.setdefault(kind_of(row), row)
    return found


def answer_of(report: Report, uses: Mapping[str, str], num_dev_prompts: int = 0) -> Answer | None:
    """Return what to use: by replay, or by decoding where nothing was replayed; None where neither
    was done.

    Args:
        uses: by ratio the name of the setting to use by dev prompts, see `setting_to_use`.
        num_dev_prompts: how many these were.
    """
    number = main_data_set(report)
    comparisons = dict[str, Comparison]()
    if number is not None:
        for ratio in ratios_of(report):
            if rows := winners_at(report.data_sets[number], ratio):
                comparisons[ratio] = _replayed(ratio, rows, uses.get(ratio))
    elif report.live:
        comparisons[MEASURED] = _decoded(report.live)
    main = preferred(list(comparisons))
    if main is None:
        return None
    comparison = comparisons.pop(main)
    setting = comparison.setting
    decoded = None
    if main == MEASURED:
        decoded = next((row for row in report.live if row.name == setting.name), None)
    return Answer(
        setting=setting.name,
        kind=comparison.use,
        speedup=setting.speedup,
        gain=setting.gain,
        is_tie=comparison.is_tie,
        comparison=comparison,
        evidence=_evidence(report, main, num_dev_prompts),
        others=[*comparisons.values()],
        decoded=decoded,
        under_verification=_under_verification(report, setting.name) if decoded else None,
        disagreements=report.disagreements,
        doubts=report.doubts,
    )


def _replayed(ratio: str, rows: Sequence[Winner], use: str | None) -> Comparison:
    """Return what replayed settings say at a ratio; without the name of what to use, the fastest
    is used.
    """
    fastest = fastest_by_kind(rows)
    choices = _choices(fastest)
    used = next((kind for kind, choice in choices.items() if choice.name == use), None)
    first = next(iter(fastest))
    if dev_speed(fastest[first]) < 1:
        first = Kind.ALONE
    return _comparison(ratio, used or first, first, fastest, choices)


def _decoded(rows: Sequence[LiveRow]) -> Comparison:
    """Return what decoded settings say: as nothing else chose, the simplest kind that no other is
    clearly faster than on these same prompts, see `setting_to_use`.
    """
    fastest = fastest_by_kind(rows)
    used = Kind.ALONE
    kinds = list(Kind)
    for number, kind in enumerate(kinds):
        if kind in fastest and dev_speed(fastest[kind]) > dev_speed(fastest[used]):
            used = kind
        later = [fastest[each] for each in kinds[number + 1 :] if each in fastest]
        if not any(is_clearly_faster(_over(row, used)) for row in later):
            break
    return _comparison(MEASURED, used, next(iter(fastest)), fastest, _choices(fastest))


def _over(row: LiveRow | Winner, used: Kind) -> Interval | None:
    """Return how much faster a setting is than the best of a simpler kind; None: not known."""
    known = {
        Kind.ALONE: row.speedup,
        Kind.FIXED: row.gain,
        Kind.HEADLESS: row.over_headless,
    }
    return known.get(used)


def _choices(fastest: Fastest) -> dict[Kind, ComparedSetting]:
    """Return what there is to choose from, the target alone among it."""
    choices = dict[Kind, ComparedSetting]()
    for kind in Kind:
        if kind in fastest:
            row = fastest[kind]
            choices[kind] = ComparedSetting(row.name, row.speedup, row.gain, row.parameters)
        elif kind == Kind.ALONE:
            fixed = fastest[Kind.FIXED].speedup
            gain = Interval(1 / fixed.value, 1 / fixed.high, 1 / fixed.low)
            choices[kind] = ComparedSetting(TARGET_ALONE.name, Interval(1, 1, 1), gain)
    return choices


def _comparison(
    ratio: str,
    used: Kind,
    first: Kind,
    fastest: Fastest,
    choices: Mapping[Kind, ComparedSetting],
) -> Comparison:
    """Return the comparison, with the advantage of the fastest setting over the one to use."""
    over_used = None if first == used else _over(fastest[first], used)
    return Comparison(ratio, used, choices, first, over_used)


def _evidence(report: Report, ratio: str, num_dev_prompts: int) -> Evidence:
    number = main_data_set(report)
    context = report.context
    name = "decoded prompts"
    num_prompts = int(str(context.get("num_live_prompts", 0)))
    if number is not None:
        name = report.data_sets[number].name
        num_prompts = report.data_sets[number].num_prompts
    split = context.get("split")
    is_timed = ratio == MEASURED
    return Evidence(
        method="decoding" if number is None else "replay",
        prompts=name,
        split=None if split is None else str(split),
        num_prompts=num_prompts,
        num_dev_prompts=0 if number is None else num_dev_prompts,
        machine=str(context.get("device", "a machine that is not named")),
        costs="timed" if is_timed else "counted",
        ratio=report.ratio if is_timed else None,
    )


def _under_verification(report: Report, name: str) -> LiveRow | None:
    """Return the decoded row of another verification rule under which the setting of this name is
    clearly faster.
    """
    for row in report.live:
        if row.same_rule == name and is_clearly_faster(row.over_same_rule):
            return row
    return None
