"""The columns of tables on the quality of responses, for the console and the page."""

from collections.abc import Callable
from typing import NamedTuple

from specheads.evaluation.intervals import Interval
from specheads.evaluation.report import LiveRow, QualityRow, Report
from specheads.evaluation.sweep import TARGET_ALONE

SCORE_TITLES = {"exact_number": "right numbers", "rouge_l": "ROUGE-L"}
QUALITY_TITLE = "Quality of responses"
ABOUT_QUALITY = (
    "Perplexity: of all emitted tokens under the target as it is, without temperature, top-k and top-p. Win rate: the share "
    "of prompts on which the response is more likely under the target, per token, than the response of the target alone; "
    "ties count half. It is about 0.5 where the target's distribution is kept. Rejections: rounds in which a drafted "
    "token was rejected, per emitted token."
)


class Column(NamedTuple):
    """A column of estimates with intervals."""

    name: str
    value: Callable[[LiveRow], Interval | None]
    digits: int = 3


def quality_columns(report: Report) -> list[Column]:
    """Return the columns on the quality of responses, none where it was not measured."""
    rows = [row.quality for row in report.live if row.quality]
    if not rows:
        return []
    columns = [
        _quality("perplexity", lambda quality: quality.perplexity, 2),
        _quality("win rate", lambda quality: quality.win_rates.get(TARGET_ALONE.name)),
        _quality("rejections per token", lambda quality: quality.rejections_per_token),
    ]
    if any(row.score for row in rows):
        name = report.context["score"]
        columns.append(_quality(SCORE_TITLES.get(name, name), lambda quality: quality.score))
    return columns


def comparisons(report: Report) -> list[str]:
    """Return how lossy settings with the same stopping rule compare, as sentences."""
    return [
        f"{row.name} over {name}: win rate {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}]"
        for row in report.live
        if row.quality
        for name, rate in row.quality.win_rates.items()
        if name != TARGET_ALONE.name
    ]


def _quality(name: str, value: Callable[[QualityRow], Interval | None], digits: int = 3) -> Column:
    return Column(name, lambda row: value(row.quality) if row.quality else None, digits)
