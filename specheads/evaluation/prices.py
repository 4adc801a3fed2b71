"""What every rule pays at every cost ratio: common costs, and what a rule computes itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specheads.evaluation.results import MEASURED
from specheads.replay.cost import CostFit, Costs, RuleCosts
from specheads.replay.replay import Counts


class Priced(Protocol):
    """A rule with its numbers, and the name of the head that it asks, if any."""

    name: str
    head: str | None


@dataclass(frozen=True)
class Prices:
    """Costs by the name of their ratio, and what heads and rules add.

    Bounds, which no decoder can have, pay nothing for what they know.
    """

    costs: Mapping[str, Costs]
    head_shares: Mapping[str, float] = field(default_factory=dict)  # by head, its cost as a share of a draft step, at the ratios
    fit: CostFit | None = None  # of the measured costs
    measured_heads: Mapping[str, float] = field(default_factory=dict)  # by head, seconds that it adds to a draft step here
    measured_rules: Mapping[str, RuleCosts] = field(default_factory=dict)  # by name, of rules whose rounds were timed
    alone: float | None = None  # tokens per second of the target alone, by the median of its steps

    def of_head(self, head: str | None, ratio: str) -> Costs:
        """Return the costs at a ratio of a rule that asks a head, given by name, or none."""
        costs = self.costs[ratio]
        if head is None:
            return costs
        measured = ratio == MEASURED and head in self.measured_heads
        step = self.measured_heads[head] if measured else self.head_shares.get(head, 0.0) * costs.draft_seconds
        return costs.with_rule(RuleCosts(step_seconds=step))

    def of(self, one: Priced | None, ratio: str) -> Costs:
        """Return the costs of a rule at a ratio; None stands for the oracle."""
        if one is None:
            return self.costs[ratio]
        if ratio == MEASURED and one.name in self.measured_rules:
            return self.costs[ratio].with_rule(self.measured_rules[one.name])
        return self.of_head(one.head, ratio)

    def head_share(self, one: Priced | None, ratio: str) -> float | None:
        """Return what a rule adds to a draft step at a ratio, as a share of it; None for one without a head."""
        if one is None or one.head is None:
            return None
        return self.of(one, ratio).draft_seconds / self.costs[ratio].draft_seconds - 1

    def speedup(self, counts: Counts, resamples: np.ndarray, one: Priced | None, ratio: str) -> np.ndarray:
        """Return the speed-up over the target alone (R,) under each row of `resamples` (R, P)."""
        seconds = self.of(one, ratio).seconds(counts.drafted, counts.rounds)
        return (resamples @ counts.tokens) / (resamples @ seconds) / (self.alone if ratio == MEASURED else 1.0)

    def break_even(
        self, counts: Counts, resamples: np.ndarray, one: Priced | None, ratio: str, fixed: np.ndarray
    ) -> np.ndarray | None:
        """Return the share of a draft step (R,) at which a head's rule would be as fast as the best fixed length, whose speed-ups are
        `fixed` (R,); None for a rule without a head.
        """
        if one is None or one.head is None:
            return None
        costs = self.costs[ratio]
        round_seconds = self.of(one, ratio).round_seconds - costs.round_seconds
        without = costs.with_rule(RuleCosts(round_seconds=round_seconds)).seconds(counts.drafted, counts.rounds)
        allowed = (resamples @ counts.tokens) / (fixed * (self.alone if ratio == MEASURED else 1.0))
        return (allowed - resamples @ without) / (resamples @ counts.drafted) / costs.draft_seconds
