"""What each head recommends: its best threshold on dev prompts and the rule that verifies fastest, stored in its folder.

`threshold=auto` reads the threshold, `SpeculativeDecoder.recommended` all of it.
"""

import logging
from pathlib import Path
from typing import Any

from specheads.decoding.stopping import HeadThreshold, StoppingRule
from specheads.evaluation.candidate import FIXED
from specheads.evaluation.head_folders import store_in_config
from specheads.evaluation.outcome import Outcome
from specheads.evaluation.report import MEASURED, Report
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import TARGET_ALONE

logger = logging.getLogger(__name__)


def recommend(setup: Setup[Evaluation], outcome: Outcome, report: Report) -> None:
    """Store the best setting in each local head, or None where the head does not pay for itself.

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
            verification = f" under {values['verification']} verification" if "verification" in values else ""
            logger.info("%s now recommends threshold %g, for threshold=auto%s", folder, values["threshold"], verification)


def recommendations(setup: Setup[Evaluation], outcome: Outcome, report: Report) -> dict[Path, dict[str, Any] | None]:
    """Return by local folder the threshold that was best on dev prompts, with its predicted speed-up.

    For a rule that was decoded there, too, `verification` is the faster one and `measured_speedup` its speed over the target
    alone. The value is None where no threshold of the head beats the best fixed length.
    """
    choices = outcome.choices
    if choices is None:
        return {}
    ratio = MEASURED if MEASURED in choices.best else choices.middle
    recommended: dict[Path, dict[str, Any] | None] = {}
    for name, located in setup.located_heads.items():
        family = f"head_threshold {name}" if len(setup.located_heads) > 1 else "head_threshold"
        number = choices.best[ratio].get(family)
        if number is None or not Path(located.where).is_dir():
            continue
        rule, speeds = outcome.candidates[number].live, choices.speeds[ratio]
        assert isinstance(rule, HeadThreshold)  # of this family
        values: dict[str, Any] = {"threshold": rule.threshold, "min_tokens": rule.min_tokens, "max_tokens": rule.max_tokens}
        values["predicted_speedup"] = report.data_sets[1].rules[number].speedup[ratio].value
        values |= tried_values(outcome, rule)
        pays = speeds[number] > speeds[choices.best[ratio][FIXED]]
        recommended[Path(located.where)] = values if pays else None
    return recommended


def tried_values(outcome: Outcome, rule: HeadThreshold) -> dict[str, Any]:
    """Return the verification under which a rule was fastest on dev prompts, and its speed there over the target alone."""
    speeds = {
        "token" if decoded.setting.verification is None else decoded.setting.verification.name: outcome.tried[
            decoded.setting.name
        ]
        for decoded in outcome.measured
        if _is_same(decoded.setting.rule, rule) and decoded.setting.name in outcome.tried
    }
    if not speeds:
        return {}
    best = max(speeds, key=speeds.__getitem__)
    return {"verification": best, "measured_speedup": speeds[best] / outcome.tried[TARGET_ALONE.name]}


def _is_same(decoded: StoppingRule | None, rule: HeadThreshold) -> bool:
    """Whether a rule was decoded with this head and threshold; it may have been fitted again since then."""
    return isinstance(decoded, HeadThreshold) and (decoded.head, decoded.threshold) == (rule.head, rule.threshold)
