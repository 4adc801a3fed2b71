"""The columns of tables on the quality of responses and on drafts of several candidates, for the console and the page."""

from collections.abc import Callable
from typing import NamedTuple

from specheads.evaluation.draft_counts import NUM_RANKS
from specheads.evaluation.intervals import Interval
from specheads.evaluation.report import CandidatesRow, LiveRow, QualityRow, Report
from specheads.evaluation.sweep import TARGET_ALONE

SCORE_TITLES = {"exact_number": "right numbers", "rouge_l": "ROUGE-L"}
QUALITY_TITLE = "Quality of responses"
CANDIDATES_TITLE = "Drafts of several candidates"
ABOUT_QUALITY = (
    "Perplexity: of all emitted tokens under the target as it is, without temperature, top-k and top-p. Win rate: the share "
    "of prompts on which the response is more likely under the target, per token, than the response of the target alone; "
    "ties count half. It is about 0.5 where the target's distribution is kept. Rejections: rounds in which a drafted "
    "token was rejected, per emitted token."
)
ABOUT_CANDIDATES = (
    "By child: of the children of accepted nodes, the accepted share, by their order among siblings. Repeated n-grams: "
    "of all n-grams in a round's draft, the share that occurred in it before."
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


def candidates_columns(report: Report) -> list[Column]:
    """Return the columns on what drafts of several candidates came to, none where drafts have a single candidate."""
    rows = [row.candidates for row in report.live if row.candidates]
    if not rows:
        return []
    columns = [
        _candidates("drafted per round", lambda row: row.drafted_per_round, 1),
        _candidates("accepted / drafted", lambda row: row.accepted_of_drafted),
        _candidates("accepted / emitted", lambda row: row.accepted_of_emitted),
    ]
    if any(row.graph_success for row in rows):
        columns.append(_candidates("rounds with a copy", lambda row: row.graph_success))
    return columns


def detail_columns(report: Report) -> list[Column]:
    """Return the columns on the ranks of accepted children and on n-grams that drafts repeat."""
    rows = [row.candidates for row in report.live if row.candidates]
    ranks = dict.fromkeys(rank for row in rows for rank in row.accepted_by_rank)
    sizes = dict.fromkeys(n for row in rows for n in row.repeated_ngrams)
    return [*map(_rank_column, ranks), *map(_repeats_column, sizes)]


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


def _candidates(name: str, value: Callable[[CandidatesRow], Interval | None], digits: int = 3) -> Column:
    return Column(name, lambda row: value(row.candidates) if row.candidates else None, digits)


def _rank_column(rank: str) -> Column:
    names = {"1": "first child", "2": "second child", "3": "third child", str(NUM_RANKS): "later children"}
    return _candidates(names[rank], lambda row: row.accepted_by_rank.get(rank))


def _repeats_column(n: str) -> Column:
    return _candidates(f"repeated {n}-grams", lambda row: row.repeated_ngrams.get(n))
