"""The recorded sets of prompts, the counts of each candidate on them, and what dev prompts choose
and recommend.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from specheads.decoding.stopping import MAX_TOKENS, FixedLength, HeadThreshold
from specheads.decoding.verification import TokenVerification
from specheads.evaluation.candidates import FIXED, TARGET_ALONE, Candidate, CostTable
from specheads.evaluation.report import COUNTED, MEASURED, ROUNDS, STEPS, Basis, BatchTable, Report
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import Measured
from specheads.forecast import progress
from specheads.replay.head_scores import record_sets
from specheads.replay.intervals import Groups, Interval, interval, resample_counts
from specheads.replay.recording import Recorder, Recording
from specheads.replay.replay import Counts, oracle, replay
from specheads.replay.response_tree import RecordSettings

# The probability with which chance alone may make the best of some settings clearly faster than
# another one
BY_CHANCE = 0.05
# The share by which settings must differ in predicted speed for one to be taken in place of the
# other
A_TIE = 0.02


@dataclass(frozen=True)
class RecordedSet:
    """The recording of one set of prompts, and the counts of each candidate on it once they are
    replayed.
    """

    name: str
    role: str  # dev: rules are tuned on it; test: they are not
    recording: Recording
    groups: Groups
    counts: list[Counts] = field(default_factory=list)

    @property
    def resamples(self) -> np.ndarray:
        """The number of times that each prompt is in each resample; see `resample_counts`."""
        return resample_counts(self.groups)


def record(setup: Setup) -> list[RecordedSet]:
    """Return the recordings of all sets of prompts of an evaluation, dev prompts first."""
    settings = setup.settings
    sets = setup.prompts.recorded
    # At least MAX_TOKENS, so that fewer rules need no other recording.
    longest = max(
        MAX_TOKENS,
        *(rule.max_tokens for choice in setup.rules.values() for rule in choice.samples()),
    )
    limits = replace(setup.prompt_data.limits, max_new_tokens=settings.max_new_tokens)
    amounts = RecordSettings(settings.record.num_samples, longest)
    recorder = Recorder(
        setup.pair, settings.warp, limits, amounts, settings.seed, setup.data_folder
    )
    prompts = {name: prompt_set.prompts for name, prompt_set in sets.items()}
    recordings = record_sets(
        recorder, prompts, list(setup.heads.values()), settings.record.ground_truth
    )
    return [
        RecordedSet(name, sets[name].role, recording, sets[name].groups)
        for name, recording in recordings.items()
    ]


def counts_of(
    recording: Recording,
    candidates: Sequence[Candidate],
    advance: Callable[[int], object] = lambda count: None,
) -> list[Counts]:
    """Replay candidates, the oracle among them.

    `advance` is called with the number of candidates that are done.
    """
    counts: dict[int, Counts] = {}
    # By compile key, so that no more rounds are in memory at once than one group of rules has.
    keys = [
        None if candidate.rule is None else candidate.rule.compile_key for candidate in candidates
    ]
    for key in dict.fromkeys(keys):
        rules = {
            number: candidates[number].rule for number, other in enumerate(keys) if other == key
        }
        known = [rule for rule in rules.values() if rule is not None]
        replayed = replay(recording, known) if known else [oracle(recording)]
        counts |= zip(
            rules, (rounds.per_prompt(recording.num_prompts) for rounds in replayed), strict=True
        )
        advance(len(rules))
    return [counts[number] for number in range(len(candidates))]


def survival(recording: Recording, num_places: int) -> list[float]:
    """Return the probability that the first 1, 2, ...

    `num_places` tokens of a draft are all accepted.
    """
    (rounds,) = replay(recording, [FixedLength(num_places)])
    place = np.arange(num_places)
    accepted = rounds.accepted[:, None] > place
    reached = (rounds.accepted[:, None] >= place) & (rounds.drafted[:, None] > place)
    return (accepted.sum(axis=0) / np.maximum(reached.sum(axis=0), 1)).cumprod().tolist()


def replay_all(sets: Sequence[RecordedSet], candidates: Sequence[Candidate]) -> list[RecordedSet]:
    """Return every recorded set with the counts of every candidate."""
    with progress("replaying", len(sets) * len(candidates)) as advance:
        return [
            replace(each, counts=counts_of(each.recording, candidates, advance)) for each in sets
        ]


@dataclass(frozen=True)
class Outcome:
    """All candidates and their costs, what was replayed and decoded of them, and which are best.

    Sets begin with dev prompts.
    """

    candidates: Sequence[Candidate]
    cost_table: CostTable
    sets: Sequence[RecordedSet] = ()
    best: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict
    )  # by ratio and family, see `chosen`
    speeds: Mapping[str, Sequence[float]] = field(
        default_factory=dict
    )  # by ratio each candidate's speed-up on dev prompts
    measured: Sequence[Measured] = ()  # the target alone comes first
    # By name, the replayed counts of each rule that was decoded, on the test prompts. A candidate
    # that was fitted again since then may have another value, with or without another name.
    decoded_counts: Mapping[str, Counts] = field(default_factory=dict)
    batches: Sequence[BatchTable] = ()
    # By setting, tokens per second (1 + R,) on dev prompts: the estimate, then resamples.
    tried: Mapping[str, np.ndarray] = field(default_factory=dict)
    doubts: Sequence[
        str
        # Why live figures are not to be trusted; then the choice stands on the ends of the cost
        # table
    ] = ()
    counted: bool = False  # whether these are counted, because the times of steps varied too much

    def chosen(self) -> "Outcome":
        """Return the outcome with the fastest candidate of each family on dev prompts.

        Rules are reported on other prompts.
        """
        best = dict[str, dict[str, int]]()
        speeds = dict[str, list[float]]()
        once = np.ones((1, self.sets[0].recording.num_prompts))
        for ratio in self.cost_table.costs:
            counted = zip(self.sets[0].counts, self.candidates, strict=True)
            best[ratio] = {}
            speeds[ratio] = [
                float(self.cost_table.speedup(counts, once, rule, ratio)[0])
                for counts, rule in counted
            ]
            for number, candidate in enumerate(self.candidates):
                so_far = best[ratio].get(candidate.family)
                is_faster = so_far is None or speeds[ratio][number] > speeds[ratio][so_far]
                if candidate.ratio in (None, ratio) and is_faster:
                    best[ratio][candidate.family] = number
        return replace(self, best=best, speeds=speeds)

    @property
    def choices(self) -> list[str]:
        """The setting to use at the low end of the range of costs, in the middle, and at the high
        end.

        It is that of the middle where no other is faster by more than A_TIE.
        """
        best = [
            setting_to_use(self._resampled(table, MEASURED), self._heads)
            for table in self.cost_table.ends
        ]
        return (
            [
                best[1] if stands else other
                for other, stands in zip(best, self.stands(best[1]), strict=True)
            ]
            if best
            else []
        )

    def stands(self, name: str) -> list[bool]:
        """Return at each of these whether no setting is faster than the one of this name by more
        than A_TIE.
        """
        ends = (self._resampled(table, MEASURED) for table in self.cost_table.ends)
        return [
            speeds[name][0] >= (1 - A_TIE) * max(each[0] for each in speeds.values())
            for speeds in ends
        ]

    @property
    def main_ratio(self) -> str:
        """The measured ratio; where none was measured, the middle one."""
        return MEASURED if MEASURED in self.best else list(self.best)[len(self.best) // 2]

    def best_threshold(self, head: str, ratio: str) -> int | None:
        """Return the number of a head's best threshold at a ratio: a given one if there is one,
        else the automatic one.
        """
        rules = {number: self.candidates[number] for number in self.achievable(ratio)}
        of_head = [
            number
            for number, rule in rules.items()
            if rule.head == head and isinstance(rule.live, HeadThreshold)
        ]
        return min(of_head, key=lambda number: rules[number].automatic, default=None)

    def achievable(self, ratio: str) -> list[int]:
        """Return the numbers of the best candidates of all families at a ratio that a decoder can
        use.
        """
        return [number for number in self.best[ratio].values() if not self.candidates[number].bound]

    @property
    def uses(self) -> dict[str, str]:
        """By ratio the setting to use by dev prompts: of those tried there at the measured ratio,
        else by replay.
        """
        found = {
            ratio: setting_to_use(self._resampled(self.cost_table, ratio), self._heads)
            for ratio in self.best
        }
        return found | (
            {MEASURED: setting_to_use(self.tried, self._heads)}
            if self.tried and not self.doubts
            else {}
        )

    @property
    def _heads(self) -> set[str]:
        """The names of the settings with a head."""
        return {
            each.name
            for each in (*self.candidates, *(m.setting for m in self.measured))
            if each.head is not None
        }

    def _resampled(self, table: CostTable, ratio: str) -> dict[str, np.ndarray]:
        """Return by setting its speed-ups (1 + R,) on dev prompts, resampled alike."""
        dev = self.sets[0]
        resamples = dev.resamples
        return {TARGET_ALONE.name: np.ones(len(resamples))} | {
            rule.name: table.speedup(counts, resamples, rule, ratio)
            for rule, counts in zip(self.candidates, dev.counts, strict=True)
            if rule.live is not None and rule.ratio in (None, ratio)
        }


def setting_to_use(speeds: Mapping[str, np.ndarray], heads: Collection[str]) -> str:
    """Return the fastest setting by `speeds` (1 + R,) on dev prompts, resampled alike, that is
    clearly worth what it asks for.

    One of `heads` must be clearly faster than the fastest that needs no head, and any setting than
    the target alone.
    """
    best = max(speeds, key=lambda name: speeds[name][0])
    if best in heads:
        other = max(
            (name for name in speeds if name not in heads), key=lambda name: speeds[name][0]
        )
        best = (
            best
            if _clearly_faster([speeds[name] / speeds[other] for name in speeds if name in heads])
            else other
        )
    alone = speeds[TARGET_ALONE.name]
    return (
        best if _clearly_faster([speed / alone for speed in speeds.values()]) else TARGET_ALONE.name
    )


def _clearly_faster(ratios: Sequence[np.ndarray]) -> bool:
    """Whether the largest ratio of speeds (1 + R,) is above 1 by more than the largest of so many
    is by chance (White 2000).
    """
    gains = np.log(ratios)
    best = gains[:, 0].argmax()
    gains /= np.maximum(
        gains[:, 1:].std(axis=1, keepdims=True), 1e-9
    )  # else the settings that are least known would decide
    return bool(np.mean((gains[:, 1:] - gains[:, :1]).max(axis=0) >= gains[best, 0]) <= BY_CHANCE)


def basis_of(outcome: Outcome) -> Basis | None:
    """Return what the choice of a setting stands on; None without measured costs of draft steps."""
    table = outcome.cost_table
    if table.fit is None or not table.fit.costs.draft_seconds:
        return None
    ratios = sorted(each.costs[MEASURED].ratio for each in table.ends or (table, *table.halves))
    ratio = Interval(table.costs[MEASURED].ratio, ratios[0], ratios[-1])
    if not table.ends:
        return Basis(ROUNDS, ratio)
    return Basis(
        COUNTED if outcome.counted else STEPS, ratio, outcome.choices[::-1]
    )  # dear draft steps: a low ratio


def recommendations(
    setup: Setup, outcome: Outcome, report: Report
) -> dict[Path, dict[str, Any] | None]:
    """Return by local folder the best setting of each head: threshold, lengths, verification, and
    how fast it is.

    None: another setting was clearly faster on dev prompts, or is predicted to be; empty: that
    depends on unknown costs.
    """
    if not outcome.best:
        return {}
    recommended: dict[Path, dict[str, Any] | None] = {}
    for name, located in setup.located_heads.items():
        if not Path(located.where).is_dir():
            continue
        tried = [each.setting for each in outcome.measured if each.setting.name in outcome.tried]
        of_head = [
            setting
            for setting in tried
            if isinstance(setting.live, HeadThreshold) and setting.head == name
        ]
        if of_head:
            recommended[Path(located.where)] = _tried(
                outcome, report, of_head, [each for each in tried if each not in of_head]
            )
        elif (number := outcome.best_threshold(name, outcome.main_ratio)) is not None:
            recommended[Path(located.where)] = _replayed(outcome, report, number)
    return recommended


def _tried(
    outcome: Outcome, report: Report, of_head: Sequence[Candidate], others: Sequence[Candidate]
) -> dict[str, Any] | None:
    """Return the fastest setting of a head on dev prompts.

    None if another one is faster by more than the prompts' chance.
    """
    speeds = outcome.tried
    best = max(of_head, key=lambda setting: speeds[setting.name][0])
    if any(interval(speeds[other.name] / speeds[best.name]).low > 1 for other in others):
        return None
    assert isinstance(best.live, HeadThreshold)
    verification = TokenVerification.name if best.verification is None else best.verification.name
    measured = {
        "verification": verification,
        "measured_speedup": (speeds[best.name] / speeds[TARGET_ALONE.name])[0],
    }
    plain = next(
        each.name for each in of_head if each.live is best.live and each.verification is None
    )
    predicted = next((row.speedup for row in report.data_sets[1].rules if row.name == plain), {})
    if MEASURED in predicted:
        measured["predicted_speedup"] = predicted[MEASURED].value
    return _values(best.live) | measured


def _replayed(outcome: Outcome, report: Report, number: int) -> dict[str, Any] | None:
    """Return a candidate's threshold with its predicted speed-up.

    None if another setting is faster, empty if that is open.
    """
    ratio = outcome.main_ratio
    rule = outcome.candidates[number].live
    assert isinstance(rule, HeadThreshold)
    speeds = outcome.speeds[ratio]
    speedup = report.data_sets[1].rules[number].speedup[ratio].value
    is_faster = speeds[number] > max(
        1, speeds[outcome.best[ratio][FIXED]]
    )  # on dev prompts; others say how fast it is
    stands = set(outcome.stands(outcome.candidates[number].name)) if outcome.doubts else {is_faster}
    if stands == {True}:
        return _values(rule) | {"predicted_speedup": speedup}
    return None if stands == {False} else {}


def _values(rule: HeadThreshold) -> dict[str, Any]:
    return {
        "threshold": rule.threshold,
        "min_tokens": rule.min_tokens,
        "max_tokens": rule.max_tokens,
    }
