"""The setting to use for a pair on this machine: the fastest on dev prompts, of those that keep the target's distribution.

Rules are chosen by replaying; block verification cannot be replayed, so the chosen rules are decoded under both. Prompts that a
report shows choose nothing.
"""

import logging
from collections.abc import Mapping

import numpy as np

from specheads.decoding.records import DecodeStats
from specheads.evaluation.decode import sweep
from specheads.evaluation.outcome import Outcome
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup
from specheads.replay.draft_temperature import TEMPERATURES, overlaps_at
from specheads.replay.recording import Recording

logger = logging.getLogger(__name__)

TEXTS_AT_ONCE = 16
NUM_TRIED = 16  # dev prompts: their texts take about half as long as those that a report shows


def tried_on_dev(setup: Setup[Evaluation], outcome: Outcome) -> dict[str, float]:
    """Return the tokens per second of the decoded settings on dev prompts, the target alone among them."""
    lossless = setup.settings.verification.lossless
    settings = [
        decoded.setting
        for decoded in outcome.measured
        if decoded.setting.search is None and (decoded.setting.rule is None or lossless)
    ]
    prompts = setup.prompts.dev.first(NUM_TRIED).prompts
    speeds = {}
    for decoded in sweep(setup, "dev-trial", settings, prompts):
        speeds[decoded.setting.name] = DecodeStats.total(decoded.stats).tokens_per_second
    logger.info("on dev prompts %s is the fastest", fastest(speeds))
    return speeds


def fastest(speeds: Mapping[str, float]) -> str:
    """Return the name of the fastest setting."""
    return max(speeds, key=speeds.__getitem__)


def draft_overlaps(setup: Setup[Evaluation], recording: Recording) -> dict[float, float]:
    """Return the draft's overlap with the target along recorded responses by its temperature; the present one comes first."""
    texts = [(np.array(prompt), np.array(recording.response(number))) for number, prompt in enumerate(recording.prompts)]
    temperatures = tuple(dict.fromkeys((setup.pair.draft_lm.temperature, *TEMPERATURES)))
    return overlaps_at(setup.pair, [text for text in texts if len(text[1])], setup.settings.warp, TEXTS_AT_ONCE, temperatures)
