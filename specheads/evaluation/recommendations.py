"""What a head's folder says after an evaluation: the head's best threshold with its speed, and the
setting that the evaluation's answer names, which may be another one.
"""

import logging
from pathlib import Path
from typing import TypedDict

from specheads.decoding.stopping import HeadThreshold
from specheads.decoding.verification import TokenVerification
from specheads.evaluation.answer import main_data_set
from specheads.evaluation.conclusions import evidence_text
from specheads.evaluation.replayed_sets import Results
from specheads.evaluation.report import Answer, Report
from specheads.evaluation.setup import Setup
from specheads.heads.head_folder import store_in_config

logger = logging.getLogger(__name__)


class Recommended(TypedDict):
    """What a head's config recommends."""

    threshold: float
    min_tokens: int
    max_tokens: int
    verification: str  # the name of its rule
    setting: str  # the name of this head with this threshold
    speedup: float  # over the target alone, with its interval
    speedup_low: float
    speedup_high: float
    use: str  # the name of the setting to use; that of `setting` if it is this head
    evidence: str  # what that rests on, as a sentence


def store_recommendations(setup: Setup, results: Results, report: Report) -> None:
    """Store in each local head what the evaluation found."""
    for folder, values in recommendations(setup, results, report).items():
        try:
            store_in_config(folder, recommended=values)
        except OSError as error:
            logger.warning("nothing could be stored in %s (%s)", folder, error.strerror)
            continue
        logger.info(
            "%s now holds threshold %g, for threshold=auto; the setting to use is %s",
            folder,
            values["threshold"],
            values["use"],
        )


def recommendations(setup: Setup, results: Results, report: Report) -> dict[Path, Recommended]:
    """Return by local folder the best threshold of each head that was replayed, and the answer."""
    number_of_set = main_data_set(report)
    if report.answer is None or number_of_set is None:
        return {}
    rows = report.data_sets[number_of_set].rules
    recommended = dict[Path, Recommended]()
    for name, located in setup.located_heads.items():
        number = results.best_threshold(name, report.answer.comparison.ratio)
        if not Path(located.where).is_dir() or number is None:
            continue
        candidate = results.candidates[number]
        rule = candidate.live
        assert isinstance(rule, HeadThreshold)
        speedup = rows[number].speedup[report.answer.comparison.ratio]
        recommended[Path(located.where)] = {
            "threshold": rule.threshold,
            "min_tokens": rule.min_tokens,
            "max_tokens": rule.max_tokens,
            "verification": _verification(report.answer, candidate.name),
            "setting": candidate.name,
            "speedup": speedup.value,
            "speedup_low": speedup.low,
            "speedup_high": speedup.high,
            "use": report.answer.setting,
            "evidence": evidence_text(report.answer),
        }
    return recommended


def _verification(answer: Answer, name: str) -> str:
    """Return the verification rule under which a setting is the fastest."""
    faster = answer.under_verification
    if answer.setting == name and faster is not None and faster.verification is not None:
        return faster.verification
    return TokenVerification.name
