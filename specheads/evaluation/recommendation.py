"""What each head recommends: its best threshold on dev prompts and the rule that verifies fastest, stored in its folder.

`threshold=auto` reads the threshold, `SpeculativeDecoder.recommended` all of it.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specheads.decoding.stopping import HeadThreshold
from specheads.decoding.verification import TokenVerification
from specheads.evaluation.candidate import FIXED
from specheads.evaluation.head_folders import store_in_config
from specheads.evaluation.intervals import interval
from specheads.evaluation.outcome import Outcome
from specheads.evaluation.replayed_sets import Choices
from specheads.evaluation.report import MEASURED, Report
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import TARGET_ALONE, Setting

logger = logging.getLogger(__name__)


def recommend(setup: Setup[Evaluation], outcome: Outcome, report: Report) -> None:
    """Store the best setting in each local head, or None where something else was clearly faster.

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
            logger.info("%s now recommends nothing, for another setting was faster", folder)
        else:
            verification = f" under {values['verification']} verification" if "verification" in values else ""
            logger.info("%s now recommends threshold %g, for threshold=auto%s", folder, values["threshold"], verification)


def recommendations(setup: Setup[Evaluation], outcome: Outcome, report: Report) -> dict[Path, dict[str, Any] | None]:
    """Return by local folder the best setting of each head: threshold, lengths, verification, and how fast it is.

    Of a head that was tried on dev prompts it is the fastest setting there, of another one the threshold that is predicted to be
    best. The value is None where another setting was clearly faster on dev prompts, or is predicted to be faster.
    """
    if outcome.choices is None:
        return {}
    recommended: dict[Path, dict[str, Any] | None] = {}
    for name, located in setup.located_heads.items():
        if not Path(located.where).is_dir():
            continue
        tried = [each.setting for each in outcome.measured if each.setting.name in outcome.tried]
        of_head = [setting for setting in tried if isinstance(setting.rule, HeadThreshold) and setting.head == name]
        if of_head:
            recommended[Path(located.where)] = _tried(outcome, report, of_head, [each for each in tried if each not in of_head])
        elif (number := outcome.choices.best_threshold(name, _ratio(outcome.choices))) is not None:
            recommended[Path(located.where)] = _replayed(outcome, outcome.choices, report, number)
    return recommended


def _tried(outcome: Outcome, report: Report, of_head: Sequence[Setting], others: Sequence[Setting]) -> dict[str, Any] | None:
    """Return the fastest setting of a head on dev prompts; None if another one is faster by more than the prompts' chance."""
    speeds = outcome.tried
    best = max(of_head, key=lambda setting: speeds[setting.name][0])
    if any(interval(speeds[other.name] / speeds[best.name]).low > 1 for other in others):
        return None
    assert isinstance(best.rule, HeadThreshold)
    verification = TokenVerification.name if best.verification is None else best.verification.name
    measured = {"verification": verification, "measured_speedup": (speeds[best.name] / speeds[TARGET_ALONE.name])[0]}
    plain = next(each.name for each in of_head if each.rule is best.rule and each.verification is None)
    predicted = next((row.speedup for row in report.data_sets[1].rules if row.name == plain), {})
    if MEASURED in predicted:
        measured["predicted_speedup"] = predicted[MEASURED].value
    return _values(best.rule) | measured


def _replayed(outcome: Outcome, choices: Choices, report: Report, number: int) -> dict[str, Any] | None:
    """Return a candidate's threshold with its predicted speed-up; None if the best fixed length or the target alone is faster."""
    ratio, rule = _ratio(choices), outcome.candidates[number].live
    assert isinstance(rule, HeadThreshold)
    speeds, speedup = choices.speeds[ratio], report.data_sets[1].rules[number].speedup[ratio].value
    if speeds[number] <= speeds[choices.best[ratio][FIXED]] or speedup <= 1:
        return None
    return _values(rule) | {"predicted_speedup": speedup}


def _ratio(choices: Choices) -> str:
    return MEASURED if MEASURED in choices.best else choices.middle


def _values(rule: HeadThreshold) -> dict[str, Any]:
    return {"threshold": rule.threshold, "min_tokens": rule.min_tokens, "max_tokens": rule.max_tokens}
