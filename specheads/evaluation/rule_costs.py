"""The costs of every rule at every cost ratio, and the fits of rules' open parameters on recorded dev prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.decoding.stopping import logistic_inputs
from specheads.evaluation.intervals import Interval, interval
from specheads.evaluation.report import MEASURED
from specheads.heads.metrics import fit_logistic
from specheads.replay.cost import CostFit
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts, RecordedHead, recorded_threshold, replay


class _Costed(Protocol):
    """A rule with its numbers: its kind and its head, if any, decide its costs."""

    @property
    def rule(self) -> Any: ...
    @property
    def kind(self) -> str: ...
    @property
    def head(self) -> str | None: ...


@dataclass(frozen=True)
class CostTable:
    """StepCosts by the name of their ratio, and the costs that heads and rules add; bounds pay nothing for their knowledge."""

    costs: Mapping[str, StepCosts]
    head_shares: Mapping[str, float] = field(default_factory=dict)  # each head's cost as a share of a draft step, at the ratios
    fit: CostFit | None = None  # what was fitted to decoded rounds
    measured_heads: Mapping[str, float] = field(default_factory=dict)  # the seconds that each head adds to a draft step here
    # The costs that kinds of rules without timed rounds add, by whether they have a head: the median of those of timed kinds. If
    # they were taken to add nothing, rules without timed rounds would look best.
    untimed: Mapping[bool, RuleCosts] = field(default_factory=dict)
    alone: float | None = None  # tokens per second of the target alone, by the median of its steps
    halves: Sequence["CostTable"] = ()  # measured costs for the even and the odd prompts, each from the rounds of the others
    ends: Sequence["CostTable"] = ()  # where steps were timed by themselves: the low end of their range, the middle, the high end

    def of_head(self, head: str | None, ratio: str) -> StepCosts:
        """Return the costs at a ratio of a rule with a head, given by name, or without one."""
        costs = self.costs[ratio]
        if head is None:
            return costs
        step = self.head_shares.get(head, 0.0) * costs.draft_seconds
        if ratio == MEASURED:
            step = self.measured_heads.get(head, step)
        return costs.with_rule(RuleCosts(step_seconds=step))

    def of(self, rule: _Costed, ratio: str) -> StepCosts:
        """Return the costs of a rule at a ratio."""
        if rule.rule is None:  # the oracle
            return self.costs[ratio]
        if ratio == MEASURED and self.fit is not None and rule.kind in self.fit.rules:
            return self.costs[ratio].with_rule(self.fit.rules[rule.kind])
        costs = self.of_head(rule.head, ratio)
        return costs.with_rule(self.untimed.get(rule.head is not None, RuleCosts())) if ratio == MEASURED else costs

    def head_share(self, rule: _Costed, ratio: str) -> float | None:
        """Return a head's cost at a ratio, as a share of a draft step; None without a head or a draft step."""
        if rule.head is None or not self.costs[ratio].draft_seconds:
            return None
        return self.of(rule, ratio).draft_seconds / self.costs[ratio].draft_seconds - 1

    def speedup(self, counts: Counts, resamples: np.ndarray, rule: _Costed, ratio: str) -> np.ndarray:
        """Return the speed-up over the target alone (R,) under each row of `resamples` (R, P)."""
        seconds = self.of(rule, ratio).seconds(counts.drafted, counts.rounds)
        return (resamples @ counts.tokens) / (resamples @ seconds) / (self.alone if ratio == MEASURED else 1.0)

    def speedup_uncharged(self, counts: Counts, resamples: np.ndarray, rule: _Costed, ratio: str) -> np.ndarray | None:
        """Return the speed-up (R,) if the rule's head cost nothing, as SpecDec++ counts; None where `head_share` is None."""
        if self.head_share(rule, ratio) is None:
            return None
        costs = replace(self.costs[ratio], round_seconds=self.of(rule, ratio).round_seconds)
        seconds = resamples @ costs.seconds(counts.drafted, counts.rounds)
        return (resamples @ counts.tokens) / seconds / (self.alone if ratio == MEASURED else 1.0)

    def break_even(self, counts: Counts, resamples: np.ndarray, rule: _Costed, ratio: str, fixed: np.ndarray) -> Interval | None:
        """Return the share of a draft step at which a head's rule would be as fast as `fixed` (R,), the best length's speed-up."""
        drafted, uncharged = resamples @ counts.drafted, self.speedup_uncharged(counts, resamples, rule, ratio)
        if uncharged is None or not drafted.all():
            return None
        # What the fixed length takes for as many tokens, less what the rule takes without its head.
        spare = (resamples @ counts.tokens) / (self.alone if ratio == MEASURED else 1.0) * (1 / fixed - 1 / uncharged)
        return interval(spare / drafted / self.costs[ratio].draft_seconds)

    def for_prompts(self, rule: _Costed, num_prompts: int) -> list[StepCosts]:
        """Return the measured costs of a rule on each of the first prompts, from rounds of other prompts if there are enough."""
        halves = self.halves or (self, self)
        return [halves[number % 2].of(rule, MEASURED) for number in range(num_prompts)]


GRID = np.linspace(0.02, 0.98, 25)  # thresholds between which the automatic one of a head is interpolated


@dataclass(frozen=True)
class Tuning:
    """The fits (see `StoppingRule.fit`) of rules' open parameters to a recording of dev prompts, with the costs at each ratio."""

    recording: Recording
    cost_table: CostTable
    _curves: dict[tuple[RecordedHead, int], list[Counts]] = field(default_factory=dict)
    _fits: dict[Any, dict[str, float]] = field(default_factory=dict)  # kept, because every value of a rule asks for them again

    def logistic(self, names: Sequence[str]) -> dict[str, float]:
        """Return the weights of a logistic of the draft's confidence; for `names` see `logistic_inputs`."""
        if tuple(names) not in self._fits:
            node, _, accepted, _ = self.recording.labels()
            features = {name: self.recording.features[name][node] for name in ("draft_prob", "max_prob", "entropy")}
            inputs = [name for name in names if name != "bias"]
            weights = fit_logistic(logistic_inputs(inputs, features), accepted.double()).tolist()
            self._fits[tuple(names)] = dict(zip([*inputs, "bias"], weights, strict=True))
        return self._fits[tuple(names)]

    @cached_property
    def mean_acceptance(self) -> float:
        """The share of proposed tokens that are accepted."""
        return self.recording.labels()[2].double().mean().item()

    def auto_threshold(self, head: RecordedHead, max_tokens: int, costs: StepCosts) -> float:
        """Return the threshold at which one more draft step yields no more than the throughput.

        It is `1 - lambda t_d / m`, with the mean acceptance m of tokens without a prediction and lambda t_d the throughput at it: a
        fixed point (SpecDec++, theorem 3.1, in renewal-reward form).
        """
        if (head, max_tokens) not in self._curves:
            rules = [recorded_threshold(head, float(threshold), max_tokens) for threshold in GRID]
            rounds = replay(self.recording, rules)
            self._curves[head, max_tokens] = [replayed.per_prompt(self.recording.num_prompts) for replayed in rounds]
        curve = self._curves[head, max_tokens]
        tokens, seconds = np.array([(each.tokens.sum(), costs.seconds(each.drafted, each.rounds).sum()) for each in curve]).T
        throughputs = tokens * (costs.draft_seconds + costs.verified_seconds) / seconds  # at GRID, per draft step
        worth = self.mean_acceptance ** (2 if head.config.predicts == "input_token" else 1)
        if not worth:  # the target accepts nothing: drafting never pays
            return float(GRID[0])
        excess = 1 - throughputs / worth - GRID  # positive where going on would pay
        last = int(np.flatnonzero(excess > 0).max(initial=0))
        part = np.clip(excess[last] / (excess[last] - excess[last + 1]), 0, 1) if last + 1 < len(GRID) else 0.0
        return round(float(GRID[last] + part * (GRID[1] - GRID[0])), 3)
