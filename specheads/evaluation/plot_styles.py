"""How each family of rules is drawn, the same in every figure, and which families a reader sees first."""

from dataclasses import dataclass

from specheads.evaluation.candidates import CEILING, FIXED, ORACLE
from specheads.evaluation.conclusions import best, winners_at
from specheads.evaluation.report import DataSet, Positions, Report, RuleRow

# The colours of Okabe and Ito without yellow and black, which cannot be seen on a white and on a black page.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#8a8a8a"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "pentagon", "star", "hexagon", "triangle-down")
FEW = 10  # families that are shown at once


@dataclass(frozen=True)
class PlotStyle:
    """How a family is drawn. plotly.js makes a CSS class of `key`, so it is no name from the data."""

    key: str
    color: str
    symbol: str
    dash: str = "solid"


def styles_of(report: Report) -> dict[str, PlotStyle]:
    """Return how each family is drawn: fixed lengths blue, heads red and purple, the bounds grey."""
    styles = {
        FIXED: PlotStyle("fixed", BLUE, "circle"),
        CEILING: PlotStyle("ceiling", GREY, "star-diamond", "dash"),
        ORACLE: PlotStyle("oracle", GREY, "star", "dot"),
    }
    rows: list[RuleRow | Positions] = []
    for data_set in report.data_sets:
        rows += [*data_set.rules, *data_set.positions]
    families = {row.family: row.head is not None for row in rows if row.family not in styles}
    for wanted, colors in ((True, (RED, PURPLE)), (False, (GREEN, ORANGE, SKY))):
        for number, family in enumerate(family for family, has_head in families.items() if has_head == wanted):
            symbol = SYMBOLS[(number // len(colors) + (not wanted)) % len(SYMBOLS)]
            styles[family] = PlotStyle(f"family{list(families).index(family)}", colors[number % len(colors)], symbol)
    return styles


def main_families(data_set: DataSet, ratio: str | None) -> set[str]:
    """Return the families that a reader sees first: fixed lengths, the best with a head and without, and the bounds.

    With an automatic threshold, its head's given thresholds are shown, too.
    """
    families = {row.family for row in data_set.rules}
    if len(families) <= FEW:
        return families
    leaders = [best(winners_at(data_set, ratio), head) for head in (True, False)]
    leading = {(row.rule_name, row.head) for row in leaders if row}
    return {FIXED, CEILING, ORACLE, *(row.family for row in data_set.rules if (row.rule_name, row.head) in leading)}
