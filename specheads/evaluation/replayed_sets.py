"""The recorded sets of prompts, the counts of each candidate on them, and what dev prompts
choose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from specheads.decoding.stopping import MAX_TOKENS, HeadThreshold
from specheads.evaluation.answer import kind_of, setting_to_use
from specheads.evaluation.candidates import TARGET_ALONE, Candidate, CostTable, Rules
from specheads.evaluation.keys import MEASURED, Kind
from specheads.evaluation.report import BatchTable
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import Measured
from specheads.load import adapt_threads, threads_by_load
from specheads.progress import Advance, progress
from specheads.replay.head_scores import record_sets
from specheads.replay.intervals import NUM_RESAMPLES, Groups, resample_counts
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts, oracle, replay_each
from specheads.replay.response_tree import RecordSettings


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

    @cached_property
    def resamples(self) -> np.ndarray:
        """The number of times that each prompt is in each resample; see `resample_counts`."""
        return resample_counts(self.groups)


def longest_draft(rules: Rules) -> int:
    """Return the longest draft of any rule; at least MAX_TOKENS, so that fewer rules need no other
    recording.
    """
    longest = MAX_TOKENS
    for choice in rules.values():
        longest = max(longest, *(rule.max_tokens for rule in choice.samples()))
    return longest


def record(setup: Setup) -> list[RecordedSet]:
    """Return the recordings of all sets of prompts of an evaluation, dev prompts first."""
    settings = setup.settings
    sets = setup.prompts.recorded
    amounts = RecordSettings(settings.record.num_samples, longest_draft(setup.rules))
    recorder = setup.recorder(amounts)
    prompts = {name: prompt_set.prompts for name, prompt_set in sets.items()}
    recordings = record_sets(
        recorder, prompts, list(setup.heads.values()), settings.record.ground_truth
    )
    recorded = list[RecordedSet]()
    for name, recording in recordings.items():
        recorded.append(RecordedSet(name, sets[name].role, recording, sets[name].groups))
    return recorded


def recorded_text(recordings: Sequence[Recording]) -> str:
    """Return how much was recorded, in a few words."""
    num_prompts = sum(recording.num_prompts for recording in recordings)
    num_tokens = sum(int(recording.lengths.sum()) for recording in recordings)
    return f"{num_prompts:,} prompts, {num_tokens:,} tokens of the target"


def counts_of(
    recording: Recording,
    candidates: Sequence[Candidate],
    advance: Advance = lambda count: None,
) -> list[Counts]:
    """Replay candidates, the oracle among them.

    `advance` is called with the number of candidates that are done.
    """
    rules = {
        number: candidate.rule
        for number, candidate in enumerate(candidates)
        if candidate.rule is not None
    }
    bounds = [number for number in range(len(candidates)) if number not in rules]
    counts: dict[int, Counts] = {}
    for number in bounds:
        counts[number] = oracle(recording).per_prompt(recording.num_prompts)
        advance(1)
    numbers = list(rules)
    with threads_by_load():
        for place, rounds in replay_each(recording, list(rules.values())):
            counts[numbers[place]] = rounds.per_prompt(recording.num_prompts)
            advance(1)
            adapt_threads()
    return [counts[number] for number in range(len(candidates))]


def replay_all(sets: Sequence[RecordedSet], candidates: Sequence[Candidate]) -> list[RecordedSet]:
    """Return every recorded set with the counts of every candidate."""
    with progress("replaying", len(sets) * len(candidates)) as advance:
        replayed = list[RecordedSet]()
        for each in sets:
            counts = counts_of(each.recording, candidates, advance)
            replayed.append(replace(each, counts=counts))
        return replayed


@dataclass(frozen=True)
class Results:
    """All candidates with their costs, what was replayed and decoded of them, and which are the
    best on dev prompts.
    """

    candidates: Sequence[Candidate]
    cost_table: CostTable
    dev: RecordedSet | None = None  # None where nothing was recorded
    tests: Sequence[RecordedSet] = ()  # the prompts of the reported split come first
    # By ratio and family the number of the fastest candidate on dev prompts
    best: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # By ratio the speed-up of each candidate on dev prompts
    speeds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    measured: Sequence[Measured] = ()  # the target alone comes first
    batches: Sequence[BatchTable] = ()
    doubts: Sequence[str] = ()  # why live figures are unreliable; empty if they are not
    # Where decoded and predicted speeds differ by more than their intervals
    disagreements: Sequence[str] = ()

    @property
    def main_ratio(self) -> str:
        """The measured ratio; where none was measured, the middle one."""
        return MEASURED if MEASURED in self.best else list(self.best)[len(self.best) // 2]

    @property
    def reported(self) -> RecordedSet:
        """The recorded prompts of the reported split."""
        return next(iter(self.tests))

    def best_threshold(self, head: str, ratio: str) -> int | None:
        """Return the number of a head's best threshold at a ratio: a given one if there is one,
        else the automatic one.
        """
        found = list[int]()
        for number in self.achievable(ratio):
            rule = self.candidates[number]
            if rule.head == head and isinstance(rule.live, HeadThreshold):
                found.append(number)
        return min(found, key=lambda each: self.candidates[each].automatic, default=None)

    def achievable(self, ratio: str) -> list[int]:
        """Return the numbers of the best candidates of all families at a ratio that a decoder can
        use.
        """
        return [number for number in self.best[ratio].values() if not self.candidates[number].bound]

    @property
    def best_of_kinds(self) -> list[Candidate]:
        """The best fixed length on dev prompts at the main ratio, the best rule with a head, and
        the best other one, where there are.
        """
        speeds = self.speeds[self.main_ratio]
        found = dict[Kind, Candidate]()
        for number in sorted(self.achievable(self.main_ratio), key=lambda each: -speeds[each]):
            rule = self.candidates[number]
            found.setdefault(kind_of(rule), rule)
        return [found[kind] for kind in (Kind.FIXED, Kind.HEAD, Kind.HEADLESS) if kind in found]

    @property
    def uses(self) -> dict[str, str]:
        """By ratio the setting to use by the recorded dev prompts."""
        kinds = {TARGET_ALONE.name: Kind.ALONE}
        for each in self.candidates:
            kinds[each.name] = kind_of(each)
        return {ratio: setting_to_use(self._resampled(ratio), kinds) for ratio in self.best}

    def _resampled(self, ratio: str) -> dict[str, np.ndarray]:
        """Return by setting its speed-ups (1 + R,) on dev prompts, resampled alike."""
        assert self.dev is not None
        resamples = self.dev.resamples
        speeds = {TARGET_ALONE.name: np.ones(len(resamples))}
        for rule, counts in zip(self.candidates, self.dev.counts, strict=True):
            if rule.live is not None and rule.ratio in (None, ratio):
                speeds[rule.name] = self.cost_table.speedup(counts, resamples, rule, ratio)
        return speeds

    def predicted(self, num_prompts: int) -> dict[str, np.ndarray]:
        """Return by decoded setting its speed-ups (1 + R,) on the first reported prompts, from
        their recording; empty where fewer were recorded.
        """
        if not self.tests or num_prompts > self.reported.recording.num_prompts:
            return {}
        resamples = np.zeros((1 + NUM_RESAMPLES, self.reported.recording.num_prompts))
        resamples[:, :num_prompts] = resample_counts(self.reported.groups[:num_prompts])
        decoded = {each.setting.name for each in self.measured if each.setting.verification is None}
        predicted = dict[str, np.ndarray]()
        for rule, counts in zip(self.candidates, self.reported.counts, strict=True):
            if rule.name in decoded and rule.ratio in (None, MEASURED):
                predicted[rule.name] = self.cost_table.speedup(counts, resamples, rule, MEASURED)
        return predicted


def chosen(
    rules: Sequence[Candidate], table: CostTable, dev: RecordedSet, tests: Sequence[RecordedSet]
) -> Results:
    """Return the results of replayed rules, with the fastest of each family on dev prompts.

    Rules are reported on other prompts.
    """
    best: dict[str, dict[str, int]] = {}
    speeds: dict[str, list[float]] = {}
    once = np.ones((1, dev.recording.num_prompts))
    for ratio in table.costs:
        best[ratio] = {}
        speeds[ratio] = []
        for number, (rule, counts) in enumerate(zip(rules, dev.counts, strict=True)):
            speeds[ratio].append(table.speedup(counts, once, rule, ratio).item())
            so_far = best[ratio].get(rule.family)
            is_faster = so_far is None or speeds[ratio][number] > speeds[ratio][so_far]
            if rule.ratio in (None, ratio) and is_faster:
                best[ratio][rule.family] = number
    return Results(rules, table, dev, tests, best, speeds)
