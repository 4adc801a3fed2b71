"""The setting to use for a pair on this machine: the fastest on dev prompts, of those that keep the target's distribution.

Rules are chosen by replaying; block verification cannot be replayed, so the chosen rules are decoded under both. Of the reported
prompts only the seconds of their rounds, to which costs are fitted, have a part in what is chosen.
"""

import logging
from collections.abc import Mapping

import numpy as np

from specheads.decoding.drafting import Autoregressive
from specheads.evaluation.decode import sweep
from specheads.evaluation.doubts import FEWEST_GROUPS
from specheads.evaluation.intervals import resample_counts, sums
from specheads.evaluation.outcome import Outcome
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup
from specheads.replay.draft_temperature import TEMPERATURES, overlaps_at
from specheads.replay.recording import Recording

logger = logging.getLogger(__name__)

TEXTS_AT_ONCE = 16
NUM_TRIED = 16  # dev prompts at most, and half as many as are decoded for the report


def tried_on_dev(setup: Setup[Evaluation], outcome: Outcome) -> dict[str, np.ndarray]:
    """Return the tokens per second (1 + R,) of the decoded settings on dev prompts, the target alone among them.

    The first entry is the estimate, the others are resamples of the prompts, the same for all settings. Nothing is tried where
    the dev prompts are too few, or too much alike, to choose by.
    """
    dev = setup.prompts.dev.spread(min(NUM_TRIED, max(FEWEST_GROUPS, setup.settings.num_live_prompts // 2)))
    if len(set(dev.groups)) < FEWEST_GROUPS:
        logger.warning(
            "dev prompts of %d independent texts are too few to choose a setting by; give more of them (data.num_dev)",
            len(set(dev.groups)),
        )
        return {}
    lossless = setup.settings.verification.lossless
    settings = [decoded.setting for decoded in outcome.measured if decoded.setting.rule is None or lossless]
    resamples = resample_counts(dev.groups)
    tried = sweep(setup, "dev-trial", settings, dev.prompts)
    speeds = {decoded.setting.name: sums(decoded.stats, resamples).tokens_per_second for decoded in tried}
    logger.info("on dev prompts %s is the fastest", fastest(speeds))
    return speeds


def fastest(speeds: Mapping[str, np.ndarray]) -> str:
    """Return the name of the setting with the largest estimate."""
    return max(speeds, key=lambda name: speeds[name][0])


def draft_overlaps(setup: Setup[Evaluation], recording: Recording) -> dict[float, float]:
    """Return the draft's overlap with the target along recorded responses by its temperature; the present one comes first.

    Nothing where no temperature matters: greedily, and for a draft that is made of the target.
    """
    if setup.settings.warp.greedy or type(setup.settings.drafting) is not Autoregressive:
        return {}
    prompts = recording.prompts[:NUM_TRIED]
    texts = [(np.array(prompt), np.array(recording.response(number))) for number, prompt in enumerate(prompts)]
    temperatures = tuple(dict.fromkeys((setup.pair.draft_lm.temperature, *TEMPERATURES)))
    return overlaps_at(setup.pair, [text for text in texts if len(text[1])], setup.settings.warp, TEXTS_AT_ONCE, temperatures)
