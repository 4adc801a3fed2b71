"""The costs that decoded rounds have here, and whether they can be trusted: a busy machine gives costs that hold nowhere."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from specheads.decoding.step_costs import RuleCosts
from specheads.evaluation.report import MEASURED, LiveRow
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.sweep import TARGET_ALONE, Measured, kinds_of, round_times
from specheads.replay.cost import CostFit, fit_costs, fits_of_halves

LEAST_R_SQUARED = 0.9  # over responses that a fit had not seen
LARGEST_SPREAD = 1.2  # mean over median of the target's steps
LARGEST_HALF_WIDTH = 0.1  # of a speed's 95 % interval, as a share of the speed
FEWEST_GROUPS = 8  # of prompts; an interval over fewer means nothing
REMEDY = "run it again on a quiet machine, or leave decoding out (live=none)"


def alone_steps(alone: Measured) -> np.ndarray:
    """Return the seconds (rounds,) of each step of the target alone, per token."""
    tokens, _, _, *seconds = np.array([numbers for prompt in alone.rounds for numbers in prompt]).T
    return sum(seconds) / tokens


def doubts_of(alone: Measured, fit: CostFit, live: Sequence[LiveRow], num_groups: int) -> list[str]:
    """Return the reasons why the measured times are not to be trusted; none if they are.

    Args:
        alone: the target without a draft.
        fit: the costs that were fitted to all rounds.
        live: the settings that were decoded.
        num_groups: the groups of prompts (files, where prompts come from files) that intervals are over.
    """
    doubts, steps = [], alone_steps(alone)
    spread = steps.mean() / np.median(steps)
    if spread > LARGEST_SPREAD:
        doubts.append(
            f"The machine was busy: a step of the target alone took {spread:.2f} times its median on average, normally at most "
            f"{LARGEST_SPREAD}; {REMEDY}."
        )
    if fit.r_squared is None:
        doubts.append(
            "Too few responses were decoded to tell how well costs explain their times; decode more (num_live_prompts=)."
        )
    elif fit.r_squared < LEAST_R_SQUARED:
        doubts.append(
            f"The machine was busy: the fitted costs explain {fit.r_squared:.2f} of the variance of the times of responses "
            f"that they were not fitted to (R², normally at least {LEAST_R_SQUARED}); {REMEDY}."
        )
    if not fit.costs.draft_seconds and any(rule.step_seconds for rule in fit.rules.values()):
        doubts.append(f"The machine was busy: no cost of a draft step could be told from these rounds; {REMEDY}.")
    if num_groups < FEWEST_GROUPS:
        doubts.append(
            f"Only {num_groups} independent prompts were decoded, at least {FEWEST_GROUPS} are needed for intervals; decode more "
            "(num_live_prompts=)."
        )
    widths = {
        row.name: (row.tokens_per_second.high - row.tokens_per_second.low) / 2 / row.tokens_per_second.value for row in live
    }
    widest = max(widths, key=widths.__getitem__, default=None)
    if widest is not None and widths[widest] > LARGEST_HALF_WIDTH:
        doubts.append(
            f"The interval of the speed of {widest} is ±{widths[widest]:.0%}, and at most ±{LARGEST_HALF_WIDTH:.0%} is "
            "accepted; decode more prompts (num_live_prompts=), on a quiet machine."
        )
    return doubts


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
