"""Fits of the open parameters of rules on recorded dev prompts.

These are the weights of a logistic, a head's calibration, and automatic thresholds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from specheads.decoding.step_costs import StepCosts
from specheads.decoding.stopping import logistic_inputs
from specheads.evaluation.rule_costs import CostTable
from specheads.heads.calibration import IndexCalibration
from specheads.heads.metrics import fit_logistic
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts, RecordedHead, head_logits, recorded_threshold, replay

GRID = np.linspace(0.02, 0.98, 25)  # thresholds between which the automatic one of a head is interpolated


@dataclass(frozen=True)
class Tuning:
    """The fits (`stopping.Fitting`) of rules' open parameters to a recording of dev prompts, with the costs at each ratio."""

    recording: Recording
    cost_table: CostTable
    _curves: dict[tuple[RecordedHead, int], list[Counts]] = field(default_factory=dict)
    _fits: dict[Any, dict[str, float]] = field(default_factory=dict)  # kept, because every value of a rule asks for them again

    def logistic(self, names: Sequence[str]) -> dict[str, float]:
        """Return the weights of a logistic of the draft's confidence; for `names` see `logistic_inputs`."""
        if tuple(names) not in self._fits:
            self._fits[tuple(names)] = self._fit_logistic(names)
        return self._fits[tuple(names)]

    def _fit_logistic(self, names: Sequence[str]) -> dict[str, float]:
        node, _, accepted, _ = self.recording.labels()
        features = {name: self.recording.features[name][node] for name in ("draft_prob", "max_prob", "entropy")}
        inputs = [name for name in names if name != "bias"]
        weights = fit_logistic(logistic_inputs(inputs, features), accepted.double()).tolist()
        return dict(zip([*inputs, "bias"], weights, strict=True))

    def calibration(self, head: RecordedHead) -> dict[str, float]:
        """Return slope and intercept that calibrate a head's logits here (Platt scaling).

        They are applied after the head's stored calibration, which may be for another warping. Each token counts once, at its
        largest index.
        """
        if head not in self._fits:
            logits, accepted, furthest = head_logits(self.recording, head)
            calibrated = IndexCalibration.from_dict(head.config.calibration)(logits[:, -1], furthest)
            fitted = fit_logistic(calibrated[:, None], accepted.double()).tolist()
            self._fits[head] = dict(zip(("slope", "intercept"), fitted, strict=True))
        return self._fits[head]

    @cached_property
    def mean_acceptance(self) -> float:
        """The share of proposed tokens that are accepted."""
        return self.recording.labels()[2].double().mean().item()

    def costs_at(self, cost_ratio: float) -> StepCosts:
        """Return the costs at which a forward pass of the target takes `cost_ratio` draft steps."""
        return StepCosts.at_ratio(cost_ratio)

    def throughputs(self, head: RecordedHead, max_tokens: int, costs: StepCosts) -> np.ndarray:
        """Return the throughput of a head at each of GRID, in tokens per time of a draft step."""
        if (head, max_tokens) not in self._curves:
            rules = [recorded_threshold(head, float(threshold), max_tokens) for threshold in GRID]
            rounds = replay(self.recording, rules)
            counts = [replayed.per_prompt(self.recording.num_prompts) for replayed in rounds]
            self._curves[head, max_tokens] = counts
        curve = self._curves[head, max_tokens]
        seconds = np.array([costs.seconds(counts.drafted, counts.rounds).sum() for counts in curve])
        return np.array([counts.tokens.sum() for counts in curve]) * (costs.draft_seconds + costs.verified_seconds) / seconds

    def auto_threshold(self, head: RecordedHead, max_tokens: int, costs: StepCosts) -> tuple[float, float]:
        """Return the threshold at which one more draft step yields no more than the throughput, and that throughput.

        The threshold is `1 - lambda t_d / m`, where m is the mean acceptance of the tokens without a prediction and lambda t_d
        the throughput at this threshold: a fixed point (SpecDec++, theorem 3.1, in renewal-reward form).
        """
        worth = self.mean_acceptance ** (2 if head.config.predicts == "input_token" else 1)
        throughputs = self.throughputs(head, max_tokens, costs)
        excess = 1 - throughputs / worth - GRID  # positive where going on would pay
        last = int(np.flatnonzero(excess > 0).max(initial=0))
        part = np.clip(excess[last] / (excess[last] - excess[last + 1]), 0, 1) if last + 1 < len(GRID) else 0.0
        threshold = GRID[last] + part * (GRID[1] - GRID[0])
        return round(float(threshold), 3), float(np.interp(threshold, GRID, throughputs))
