"""The costs of every rule at every cost ratio: those common to all rules, and those of the rule itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.evaluation.doubts import alone_steps
from specheads.evaluation.report import MEASURED
from specheads.evaluation.sweep import TARGET_ALONE, Measured, kinds_of, round_times
from specheads.replay.cost import CostFit, fit_costs, fits_of_halves
from specheads.replay.replay import Counts


class Costed(Protocol):
    """A rule with its numbers: its kind and its head, if any, decide its costs."""

    @property
    def kind(self) -> str:
        """The name of the kind of rule."""

    @property
    def head(self) -> str | None:
        """The name of its head; None if it has none."""


@dataclass(frozen=True)
class CostTable:
    """StepCosts by the name of their ratio, and the costs that heads and rules add.

    Bounds, which no decoder can reach, pay nothing for their knowledge.
    """

    costs: Mapping[str, StepCosts]
    head_shares: Mapping[str, float] = field(default_factory=dict)  # by head, its cost as a share of a draft step, at the ratios
    fit: CostFit | None = None  # of the measured costs
    measured_heads: Mapping[str, float] = field(default_factory=dict)  # by head, seconds that it adds to a draft step here
    # The costs that kinds of rules without timed rounds add, by whether they have a head: the median of those of timed kinds. If
    # they were taken to add nothing, rules without timed rounds would look best.
    untimed: Mapping[bool, RuleCosts] = field(default_factory=dict)
    alone: float | None = None  # tokens per second of the target alone, by the median of its steps
    halves: Sequence["CostTable"] = ()  # measured costs for the even and the odd prompts, each from the rounds of the others

    def at_ratios(self) -> "CostTable":
        """Return the table without measured costs."""
        return CostTable({ratio: costs for ratio, costs in self.costs.items() if ratio != MEASURED}, self.head_shares)

    def of_head(self, head: str | None, ratio: str) -> StepCosts:
        """Return the costs at a ratio of a rule with a head, given by name, or without one."""
        costs = self.costs[ratio]
        if head is None:
            return costs
        step = self.head_shares.get(head, 0.0) * costs.draft_seconds
        if ratio == MEASURED:
            step = self.measured_heads.get(head, step)
        return costs.with_rule(RuleCosts(step_seconds=step))

    def of(self, rule: Costed | None, ratio: str) -> StepCosts:
        """Return the costs of a rule at a ratio; None stands for the oracle."""
        if rule is None:
            return self.costs[ratio]
        if ratio == MEASURED and self.fit is not None and rule.kind in self.fit.rules:
            return self.costs[ratio].with_rule(self.fit.rules[rule.kind])
        costs = self.of_head(rule.head, ratio)
        return costs.with_rule(self.untimed.get(rule.head is not None, RuleCosts())) if ratio == MEASURED else costs

    def head_share(self, rule: Costed | None, ratio: str) -> float | None:
        """Return a head's cost at a ratio, as a share of a draft step; None without a head or a draft step."""
        if rule is None or rule.head is None or not self.costs[ratio].draft_seconds:
            return None
        return self.of(rule, ratio).draft_seconds / self.costs[ratio].draft_seconds - 1

    def speedup(self, counts: Counts, resamples: np.ndarray, rule: Costed | None, ratio: str) -> np.ndarray:
        """Return the speed-up over the target alone (R,) under each row of `resamples` (R, P)."""
        seconds = self.of(rule, ratio).seconds(counts.drafted, counts.rounds)
        return (resamples @ counts.tokens) / (resamples @ seconds) / (self.alone if ratio == MEASURED else 1.0)

    def break_even(
        self, counts: Counts, resamples: np.ndarray, rule: Costed | None, ratio: str, fixed: np.ndarray
    ) -> np.ndarray | None:
        """Return the share of a draft step (R,) at which a head's rule would be as fast as the best fixed length.

        `fixed` (R,) are the speed-ups of the best fixed length. None for a rule without a head, or without a draft step.
        """
        if self.head_share(rule, ratio) is None:
            return None
        costs = self.costs[ratio]
        round_seconds = self.of(rule, ratio).round_seconds - costs.round_seconds
        without = costs.with_rule(RuleCosts(round_seconds=round_seconds)).seconds(counts.drafted, counts.rounds)
        allowed = (resamples @ counts.tokens) / (fixed * (self.alone if ratio == MEASURED else 1.0))
        return (allowed - resamples @ without) / (resamples @ counts.drafted) / costs.draft_seconds

    def for_prompts(self, rule: Costed, num_prompts: int) -> list[StepCosts]:
        """Return the measured costs of a rule on each of the first prompts, from rounds of other prompts if there are enough."""
        halves = self.halves or (self, self)
        return [halves[number % 2].of(rule, MEASURED) for number in range(num_prompts)]


def with_measured(
    table: CostTable, measured: Sequence[Measured], sizes: Mapping[str, float], shares: Mapping[str, float] | None = None
) -> CostTable:
    """Return a table with the measured costs of the decoded rules.

    Args:
        measured: the decoded settings, the target alone among them.
        sizes: by head, its counted share of a draft step; a head that was not decoded gets the cost of decoded heads of similar
            sizes.
        shares: by the kind of a rule, what it adds to a draft step as a share of the step, where steps were timed.
    """
    times, kinds, shares = round_times(measured), kinds_of(measured), shares or {}
    alone = np.concatenate([alone_steps(decoded) for decoded in measured if decoded.setting == TARGET_ALONE])
    speed = float(1 / np.median(alone))

    def fitted(fit: CostFit) -> CostTable:
        heads = _head_seconds(fit, measured, sizes)
        costs = {MEASURED: fit.costs, **table.at_ratios().costs}
        return CostTable(costs, table.head_shares, fit, heads, _untimed(fit, measured, kinds), speed)

    halves = fits_of_halves(times, kinds, shares)
    return replace(fitted(fit_costs(times, kinds, shares)), halves=() if halves is None else tuple(map(fitted, halves)))


def _head_seconds(fit: CostFit, measured: Sequence[Measured], sizes: Mapping[str, float]) -> dict[str, float]:
    """Return by head the seconds that it adds to a draft step: the mean of its rules', or interpolated between other heads."""
    steps: dict[str, list[float]] = {}
    heads = {decoded.setting.kind: decoded.setting.head for decoded in measured if decoded.setting.verification is None}
    for kind, head in heads.items():
        if head is not None:
            steps.setdefault(head, []).append(fit.rules[kind].step_seconds)
    timed = {head: float(np.mean(seconds)) for head, seconds in steps.items()}
    if not timed:
        return {}
    order = sorted(timed, key=sizes.__getitem__)
    between = np.interp(list(sizes.values()), [sizes[head] for head in order], [timed[head] for head in order])
    return dict(zip(sizes, between.tolist(), strict=True)) | timed


def _untimed(fit: CostFit, measured: Sequence[Measured], kinds: Mapping[str, bool]) -> dict[bool, RuleCosts]:
    """Return the median of the costs that timed kinds of rules add, by whether they have a head.

    The costs per step of rules with a head are left out, because those of heads are known separately.
    """
    # Untimed rules are replayed under the sweep's verification, so what was decoded under another one says nothing of them.
    has_head = {
        decoded.setting.kind: decoded.setting.head is not None for decoded in measured if decoded.setting.verification is None
    }
    medians = {}
    for head in (False, True):
        timed = [fit.rules[kind] for kind, plain in kinds.items() if not plain and has_head.get(kind) == head]
        if timed:
            step = 0.0 if head else float(np.median([rule.step_seconds for rule in timed]))
            medians[head] = RuleCosts(step, float(np.median([rule.round_seconds for rule in timed])))
    return medians
