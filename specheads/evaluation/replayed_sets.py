"""The counts of each candidate on each recorded set of prompts, and the choice of the best of each family on dev prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from specheads.decoding.stopping import MAX_TOKENS, HeadThreshold
from specheads.evaluation.candidates import ORACLE, Candidate, longest_draft
from specheads.evaluation.intervals import Groups, resample_counts
from specheads.evaluation.live_rows import ResponseQuality
from specheads.evaluation.report import MEASURED, BatchTable
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import Measured
from specheads.forecast import progress
from specheads.heads.head import AcceptanceHead
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import EncodedPrompt, ResponseLimits
from specheads.replay.head_scores import add_predictions, head_fingerprint, predictor_names
from specheads.replay.recording import GROUND_TRUTH, Recording, load_recording, make_recording
from specheads.replay.replay import Counts, oracle, replay
from specheads.replay.response_tree import RecordSettings


@dataclass(frozen=True)
class RecordedSet:
    """The recording of one set of prompts."""

    name: str
    role: str  # dev: rules are tuned on it; test: they are not
    recording: Recording
    groups: Groups  # the group of each prompt


@dataclass(frozen=True)
class Recorder:
    """How prompts are recorded: everything that decides a recording but the prompts and the heads."""

    pair: Pair
    warp: Warp
    limits: ResponseLimits
    settings: RecordSettings
    seed: int
    folder: Path  # that holds all recordings

    def record(
        self, sets: Mapping[str, Sequence[EncodedPrompt]], heads: Sequence[AcceptanceHead], ground_truth: bool
    ) -> dict[str, Recording]:
        """Return the recording of each set of prompts by name.

        It has the predictions of `heads`, all made in one forward pass, and with `ground_truth` the true acceptance
        probabilities.
        """
        named, total = {head_fingerprint(head): head for head in heads}, sum(map(len, sets.values()))
        folders = {}
        with progress("recording", total) as advance:
            for name, prompts in sets.items():
                folders[name] = make_recording(
                    self.pair, prompts, self.warp, self.limits, self.settings, self.seed, self.folder, advance
                )
        with progress("predicting", (bool(named) + bool(ground_truth)) * total) as advance:
            for folder in folders.values():
                add_predictions(folder, self.pair, named, ground_truth, advance)
        names = [*predictor_names(named), *([GROUND_TRUTH] if ground_truth else [])]
        return {name: load_recording(folder, names) for name, folder in folders.items()}


def record(setup: Setup) -> list[RecordedSet]:
    """Return the recordings of all sets of prompts of an evaluation, dev prompts first."""
    settings, sets = setup.settings, setup.prompts.recorded()
    longest = max(longest_draft(setup.rules), MAX_TOKENS)  # so that fewer rules need no other recording
    amounts = RecordSettings(settings.record.num_samples, longest, settings.record.batch_size)
    limits = replace(setup.prompt_data.limits, max_new_tokens=settings.max_new_tokens)
    recorder = Recorder(setup.pair, settings.warp, limits, amounts, settings.seed, setup.data_folder)
    prompts = {name: prompt_set.prompts for name, prompt_set in sets.items()}
    recordings = recorder.record(prompts, list(setup.heads.values()), settings.record.ground_truth)
    return [
        RecordedSet(name, sets[name].role, recording, setup.prompts.groups_of(recording.prompt_ids))
        for name, recording in recordings.items()
    ]


Advance = Callable[[int], None]


@dataclass(frozen=True)
class ReplayedSet:
    """A recording of one set of prompts, and the counts of each candidate on it; those of the oracle come last."""

    name: str
    role: str
    recording: Recording
    counts: Sequence[Counts]
    groups: Groups | None = None  # the group of each prompt; None: each prompt is a group by itself

    @property
    def resamples(self) -> np.ndarray:
        """The number of times that each prompt is in each resample; see `resample_counts`."""
        return resample_counts(self.groups or self.recording.num_prompts)

    @classmethod
    def of(cls, recorded: RecordedSet, candidates: Sequence[Candidate], advance: Advance = lambda count: None) -> "ReplayedSet":
        """Replay all candidates; `advance` is called with the number of candidates that are done."""
        recording, counts = recorded.recording, {}
        # By compile key, so that no more rounds are in memory at once than one group of rules has.
        for key in dict.fromkeys(candidate.rule.compile_key for candidate in candidates):
            numbers = [number for number, candidate in enumerate(candidates) if candidate.rule.compile_key == key]
            for number, rounds in zip(numbers, replay(recording, [candidates[number].rule for number in numbers]), strict=True):
                counts[number] = rounds.per_prompt(recording.num_prompts)
            advance(len(numbers))
        counts[len(candidates)] = oracle(recording).per_prompt(recording.num_prompts)
        return cls(recorded.name, recorded.role, recording, [counts[n] for n in range(len(counts))], recorded.groups)

    def with_counts(self, changed: Mapping[int, Counts]) -> "ReplayedSet":
        """Return the set with other counts of some candidates, by number."""
        return replace(self, counts=[changed.get(number, counts) for number, counts in enumerate(self.counts)])


def replay_all(recorded: Sequence[RecordedSet], candidates: Sequence[Candidate]) -> list[ReplayedSet]:
    """Return the counts of every candidate on every recorded set."""
    with progress("replaying", len(recorded) * len(candidates)) as advance:
        return [ReplayedSet.of(recording, candidates, advance) for recording in recorded]


Choice = dict[str, int]  # family -> number of the best candidate


@dataclass(frozen=True)
class Choices:
    """By ratio the best candidate of every family on dev prompts, and the oracle; and every candidate's speed-up there.

    `candidates` and `cost_table` are those of the choice.
    """

    candidates: Sequence[Candidate]
    cost_table: CostTable
    best: Mapping[str, Choice]
    speeds: Mapping[str, Sequence[float]]

    @property
    def middle(self) -> str:
        """The middle ratio, for tables and figures that show only one."""
        names = [name for name in self.best if name != MEASURED] or list(self.best)
        return names[len(names) // 2]

    def best_threshold(self, head: str, ratio: str) -> int | None:
        """Return the number of a head's best threshold at a ratio: a given one if there is one, else the automatic one."""
        of_head = [
            number
            for number in self.achievable(ratio)
            if self.candidates[number].head == head and isinstance(self.candidates[number].live, HeadThreshold)
        ]
        return min(of_head, key=lambda number: self.candidates[number].automatic, default=None)

    def achievable(self, ratio: str) -> list[int]:
        """Return the numbers of the best candidates of all families at a ratio that a decoder can use."""
        numbers = [number for number in self.best[ratio].values() if number < len(self.candidates)]
        return [number for number in numbers if not self.candidates[number].bound]


def choose(dev: ReplayedSet, candidates: Sequence[Candidate], cost_table: CostTable) -> Choices:
    """Return the fastest candidate of each family on the prompts of `dev`; rules are reported on other prompts."""
    once = np.ones((1, dev.recording.num_prompts))
    choices: dict[str, Choice] = {}
    speeds: dict[str, list[float]] = {}
    for ratio in cost_table.costs:
        speeds[ratio] = [
            float(cost_table.speedup(counts, once, candidate, ratio)[0])
            for counts, candidate in zip(dev.counts, [*candidates, None], strict=True)
        ]
        best: Choice = {}
        for number, candidate in enumerate(candidates):
            so_far = best.get(candidate.family)
            is_faster = so_far is None or speeds[ratio][number] > speeds[ratio][so_far]
            if candidate.ratio in (None, ratio) and is_faster:
                best[candidate.family] = number
        choices[ratio] = best | {ORACLE: len(candidates)}
    return Choices(candidates, cost_table, choices, speeds)


@dataclass(frozen=True)
class Outcome:
    """All candidates and their costs, what was replayed and decoded of them, and which are best.

    Recorded and replayed sets begin with that of dev prompts; `choices` is None where nothing was replayed.
    """

    candidates: Sequence[Candidate]
    cost_table: CostTable
    recorded: Sequence[RecordedSet] = ()
    replayed: Sequence[ReplayedSet] = ()
    choices: Choices | None = None
    measured: Sequence[Measured] = ()  # the target alone comes first
    # By name, the replayed counts of each rule that was decoded, on the test prompts. A candidate that was fitted again since
    # then may have another value, with or without another name.
    decoded_counts: Mapping[str, Counts] = field(default_factory=dict)
    responses: Mapping[str, ResponseQuality] = field(default_factory=dict)  # by setting, where quality is measured
    batches: Sequence[BatchTable] = ()
    # By setting, tokens per second (1 + R,) on dev prompts: the estimate, then resamples.
    tried: Mapping[str, np.ndarray] = field(default_factory=dict)
    draft_overlaps: Mapping[float, float] = field(
        default_factory=dict
    )  # on dev prompts, by the draft's temperature, its own first
    undecoded: Sequence[str] = ()  # names of rules that are best at the measured costs, but were not decoded
