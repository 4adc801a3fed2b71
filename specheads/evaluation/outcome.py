"""The results that the steps of an evaluation pass to each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specheads.evaluation.candidate import Candidate
from specheads.evaluation.recordings import RecordedSet
from specheads.evaluation.replayed_sets import Choices, ReplayedSet
from specheads.evaluation.report import BatchTable
from specheads.evaluation.response_quality import ResponseQuality
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.sweep import Measured
from specheads.replay.replay import Counts


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
    # By setting, tokens per second (1 + R,) on dev prompts: the estimate, then resamples (dev_trial.py).
    tried: Mapping[str, np.ndarray] = field(default_factory=dict)
    draft_overlaps: Mapping[float, float] = field(
        default_factory=dict
    )  # on dev prompts, by the draft's temperature, its own first
    undecoded: Sequence[str] = ()  # names of rules that are best at the measured costs, but were not decoded
