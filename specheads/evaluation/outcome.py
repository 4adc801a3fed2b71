"""The results that the steps of an evaluation pass to each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from specheads.evaluation.candidate import Candidate
from specheads.evaluation.recordings import RecordedSet
from specheads.evaluation.replayed_sets import Choices, ReplayedSet
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.sweep import Measured


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
    undecoded: Sequence[str] = ()  # names of rules that are best at the measured costs, but were not decoded

    @property
    def names(self) -> dict[str, int]:
        """The number of each candidate, by name."""
        return {candidate.name: number for number, candidate in enumerate(self.candidates)}
