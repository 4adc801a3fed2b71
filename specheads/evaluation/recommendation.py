"""The threshold that each head recommends, for `threshold=auto`: the best one on dev prompts, stored in its folder."""

import logging
from pathlib import Path

from specheads.decoding.stopping import HeadThreshold
from specheads.evaluation.candidate import FIXED
from specheads.evaluation.head_folders import store_in_config
from specheads.evaluation.outcome import Outcome
from specheads.evaluation.report import MEASURED, Report
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup

logger = logging.getLogger(__name__)


def recommend(setup: Setup[Evaluation], outcome: Outcome, report: Report) -> None:
    """Store the best threshold in each local head, or None where the head does not pay for itself.

    Nothing is stored where the measured costs are doubtful.
    """
    for folder, values in recommendations(setup, outcome, report).items():
        if report.doubts:
            logger.warning("no threshold was stored in %s, because the measured costs are not to be trusted", folder)
            continue
        try:
            store_in_config(folder, recommended=values)
        except OSError as error:
            logger.warning("nothing could be stored in %s (%s)", folder, error.strerror)
            continue
        if values is None:
            logger.info("%s does not pay for itself: it recommends no threshold", folder)
        else:
            logger.info("%s now recommends threshold %g, for threshold=auto", folder, values["threshold"])


def recommendations(setup: Setup[Evaluation], outcome: Outcome, report: Report) -> dict[Path, dict[str, float] | None]:
    """Return by local folder the threshold that was best on dev prompts, with its predicted speed-up.

    The value is None where no threshold of the head beats the best fixed length.
    """
    choices = outcome.choices
    if choices is None:
        return {}
    ratio = MEASURED if MEASURED in choices.best else choices.middle
    recommended: dict[Path, dict[str, float] | None] = {}
    for name, located in setup.located_heads.items():
        family = f"head_threshold {name}" if len(setup.located_heads) > 1 else "head_threshold"
        number = choices.best[ratio].get(family)
        if number is None or not Path(located.where).is_dir():
            continue
        rule, speeds = outcome.candidates[number].live, choices.speeds[ratio]
        assert isinstance(rule, HeadThreshold)  # of this family
        values = {"threshold": rule.threshold, "min_tokens": rule.min_tokens, "max_tokens": rule.max_tokens}
        values["predicted_speedup"] = report.data_sets[1].rules[number].speedup[ratio].value
        pays = speeds[number] > speeds[choices.best[ratio][FIXED]]
        recommended[Path(located.where)] = values if pays else None
    return recommended
