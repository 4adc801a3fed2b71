"""Whether measured times can be trusted: a machine that is busy with something else gives costs that hold nowhere."""

from collections.abc import Sequence

import numpy as np

from specheads.evaluation.report import LiveRow
from specheads.evaluation.sweep import Measured
from specheads.replay.cost import CostFit

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
