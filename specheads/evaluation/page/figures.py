"""The page's figures: one plotly figure per data set, or per data set and ratio.

The page colours their text and grid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from math import inf

import plotly.graph_objects as go

from specheads.errors import is_number
from specheads.evaluation.answer import fastest_by_kind, preferred, ratios_of, winners_at
from specheads.evaluation.candidates import CEILING, FIXED, ORACLE
from specheads.evaluation.conclusions import ratio_text, times
from specheads.evaluation.keys import Kind
from specheads.evaluation.report import DataSet, Report, RuleRow
from specheads.replay.intervals import Interval

# The colours of Okabe and Ito without yellow and black, which cannot be seen on a white and on a
# black page.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
SKY = "#56B4E9"
PURPLE = "#CC79A7"
GREY = "#8a8a8a"
OF_HEADS = (RED, PURPLE, "#8c564b", "#e377c2", "#9467bd", "#b8860b")
OF_OTHERS = (GREEN, ORANGE, SKY, "#17becf", "#7f9f2f", "#5b7fb5")
SYMBOLS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "x",
    "cross",
    "pentagon",
    "star",
    "hexagon",
    "triangle-down",
)

# By the number of a data set, "0", or by that and a ratio, "0 10".
Figures = Mapping[str, go.Figure]


@dataclass(frozen=True)
class Style:
    """How a family of rules is drawn."""

    key: str  # plotly.js makes a CSS class of it, so it is no name from the data
    color: str
    symbol: str

    def marker(self, size: float | Sequence[float]) -> dict[str, object]:
        return {"color": self.color, "symbol": self.symbol, "size": size}


def figures_of(report: Report) -> dict[str, Figures]:
    """Return every figure that there is data for, by name."""
    ratios = ratios_of(report)
    styles = _styles_of(report)
    speed = dict[str, go.Figure]()
    pareto = dict[str, go.Figure]()
    reliability = dict[str, go.Figure]()
    for number, data_set in enumerate(report.data_sets):
        if data_set.rules:
            main = _main_families(data_set, preferred(ratios))
            pareto[f"{number}"] = _pareto(report, data_set, styles, main)
        if any("threshold" in row.parameters for row in data_set.rules):
            for ratio in ratios:
                if winners_at(data_set, ratio):
                    speed[f"{number} {ratio}"] = _speed(report, data_set, ratio, styles)
        if data_set.reliability:
            reliability[f"{number}"] = _reliability(data_set)
    drawn = {"speed": speed, "pareto": pareto, "reliability": reliability}
    return {name: figures for name, figures in drawn.items() if figures}


def _styles_of(report: Report) -> dict[str, Style]:
    """Return by family how it is drawn: fixed lengths blue, heads red and purple, bounds grey.

    A rule with an automatic value has the colour of the same rule with given values.
    """
    styles = {
        FIXED: Style("fixed", BLUE, "circle"),
        CEILING: Style("ceiling", GREY, "star-diamond"),
        ORACLE: Style("oracle", GREY, "star"),
    }
    known: dict[bool, dict[tuple[str, str | None], int]] = {True: {}, False: {}}
    for row in chain.from_iterable(data_set.rules for data_set in report.data_sets):
        if row.family not in styles:
            colors = OF_HEADS if row.head else OF_OTHERS
            alike = known[row.head is not None]
            number = alike.setdefault((row.rule_name, row.head), len(alike))
            symbol = SYMBOLS[(number + 5 * row.automatic) % len(SYMBOLS)]
            color = colors[number % len(colors)]
            styles[row.family] = Style(f"family{len(styles)}", color, symbol)
    return styles


def _main_families(data_set: DataSet, ratio: str | None) -> set[str]:
    """Return the families that a reader sees first: fixed lengths, the best rule without a head,
    the best head's, the bounds.
    """
    fastest = fastest_by_kind(winners_at(data_set, ratio))
    leading = {(row.rule_name, row.head) for row in fastest.values()}
    if Kind.HEAD in fastest:
        leading.add(("head_threshold", fastest[Kind.HEAD].head))
    families = {FIXED, CEILING, ORACLE}
    for row in data_set.rules:
        if (row.rule_name, row.head) in leading:
            families.add(row.family)
    return families


def _speed(report: Report, data_set: DataSet, ratio: str, styles: Mapping[str, Style]) -> go.Figure:
    """Return speed-ups at a ratio by threshold.

    Of several rules with one threshold, of the fastest on dev prompts.
    """
    title = f"speed-up at ratio {ratio_text(report, ratio)}: times the target alone"
    figure = _figure("threshold", title, 480)
    main = _main_families(data_set, ratio)
    dev = next((each.rules for each in report.data_sets if each.role == "dev"), data_set.rules)
    best = dict[str, dict[float, tuple[float, RuleRow]]]()  # by family and threshold
    for row, on_dev in zip(data_set.rules, dev, strict=True):
        threshold = row.parameters.get("threshold")
        if ratio not in row.speedup or not is_number(threshold) or row.bound:
            continue
        of_family = best.setdefault(row.family, {})
        dev_speed = on_dev.speedup[ratio].value
        if threshold not in of_family or dev_speed > of_family[threshold][0]:
            of_family[threshold] = (dev_speed, row)
    for family, points in best.items():
        thresholds = sorted(points)
        speeds = list[Interval]()
        settings = list[str]()
        hover = list[str]()
        for threshold in thresholds:
            _, row = points[threshold]
            speeds.append(row.speedup[ratio])
            settings.append(row.name)
            hover.append(_hover(report, row))
        style = styles[family]
        _draw(
            figure,
            thresholds,
            speeds,
            hover,
            mode="lines+markers",
            marker=style.marker(8),
            line={"color": style.color, "width": 1.5},
            customdata=settings,
            **_legend(family, style, main),
        )
    fixed = fastest_by_kind(winners_at(data_set, ratio))[Kind.FIXED].speedup.value
    for name, speed, color in ((Kind.FIXED, fixed, BLUE), (Kind.ALONE, 1.0, GREY)):
        dashed = {"color": color, "dash": "dash", "width": 1.5}
        _draw(figure, [0, 1], [speed, speed], mode="lines", line=dashed, name=name)
    return figure.update_xaxes(range=[-0.03, 1.03])


def _figure(x: str, y: str, height: int) -> go.Figure:
    axis = {"automargin": True, "zeroline": False}
    return go.Figure(
        layout={
            "template": go.layout.Template(),
            "height": height,
            "hovermode": "closest",
            "margin": {"l": 10, "r": 10, "t": 40, "b": 10},
            "showlegend": True,
            "xaxis": axis | {"title": {"text": x, "font": {"size": 13}}},
            "yaxis": axis | {"title": {"text": y, "font": {"size": 13}}},
        }
    )


def _draw(
    figure: go.Figure,
    x: Sequence[object],
    y: Sequence[object],
    hover: Sequence[str] | None = None,
    **look: object,
) -> None:
    """Add a trace, of intervals with error bars; without `hover` its points say nothing.

    `customdata` names their settings, for the table of the numbers.
    """
    x_values, x_errors = _with_errors(x)
    y_values, y_errors = _with_errors(y)
    figure.add_scatter(
        x=x_values,
        y=y_values,
        error_x=x_errors,
        error_y=y_errors,
        hovertext=hover,
        hoverinfo="skip" if hover is None else "text",
        **look,
    )


def _with_errors(points: Sequence[object]) -> tuple[list[object], dict[str, object] | None]:
    """Return the values of points, and plotly's error bars where they are intervals."""
    intervals = [point for point in points if isinstance(point, Interval)]
    if len(intervals) < max(1, len(points)):
        return list(points), None
    errors = {
        "array": [each.high - each.value for each in intervals],
        "arrayminus": [each.value - each.low for each in intervals],
        "symmetric": False,
        "thickness": 1,
        "width": 2,
    }
    return [each.value for each in intervals], errors


def _legend(family: str, style: Style, main: set[str]) -> dict[str, object]:
    """Return a trace's name in the legend; a family that is not a main one is drawn when the reader
    asks for all.
    """
    return {"name": escape(family), "uid": style.key, "visible": family in main}


def _pareto(
    report: Report, data_set: DataSet, styles: Mapping[str, Style], main: set[str]
) -> go.Figure:
    figure = _figure(
        "discard rate: discarded tokens per token",
        "verification rate: forward passes of the target per token",
        540,
    )
    rates = list[tuple[float, float]]()  # of what a decoder can use
    for row in data_set.rules:
        if not row.bound:
            rates.append((row.discard_rate.value, row.verification_rate.value))
    discard = list[float]()
    verification = list[float]()
    least = inf
    for discard_rate, verification_rate in sorted(rates):
        if verification_rate < least:
            least = verification_rate
            discard.append(discard_rate)
            verification.append(verification_rate)
    thin = {"color": GREY, "width": 1}
    _draw(figure, discard, verification, mode="lines", line=thin, name="Pareto front")
    families = dict[str, list[RuleRow]]()
    for row in data_set.rules:
        families.setdefault(row.family, []).append(row)
    for family, rows in families.items():
        _draw(
            figure,
            [row.discard_rate for row in rows],
            [row.verification_rate for row in rows],
            [_hover(report, row) for row in rows],
            mode="markers",
            marker=styles[family].marker(8),
            customdata=[row.name for row in rows],
            **_legend(family, styles[family], main),
        )
    return figure


def _hover(report: Report, row: RuleRow) -> str:
    lines = [f"<b>{escape(row.name)}</b>"]
    rates = {"discard rate": row.discard_rate, "verification rate": row.verification_rate}
    for name, rate in rates.items():
        lines.append(f"{name} {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}]")
    for ratio, speedup in row.speedup.items():
        lines.append(f"speed-up at {ratio_text(report, ratio)}: {times(speedup)}")
    return "<br>".join(lines)


def _reliability(data_set: DataSet) -> go.Figure:
    figure = _figure("predicted chance of acceptance", "observed share accepted", 520)
    dashed = {"color": GREY, "dash": "dash", "width": 1}
    _draw(figure, [0, 1], [0, 1], mode="lines", line=dashed, name="calibrated")
    colors = (RED, BLUE, GREEN, PURPLE, ORANGE, SKY)
    for number, curve in enumerate(data_set.reliability):
        style = Style("", colors[number % len(colors)], SYMBOLS[number // len(colors)])
        predictor = escape(curve.predictor)
        hover = list[str]()
        for share, predicted, observed in zip(
            curve.share, curve.predicted, curve.observed, strict=True
        ):
            hover.append(
                f"<b>{predictor}</b><br>{share:.1%} of tokens<br>predicted {predicted:.1%}"
                f"<br>accepted {observed:.1%}"
            )
        marker = style.marker([5 + 30 * share**0.5 for share in curve.share])
        _draw(
            figure,
            curve.predicted,
            curve.observed,
            hover,
            mode="lines+markers",
            line={"color": style.color, "width": 1.5},
            marker=marker | {"opacity": 0.75, "line": {"width": 0}},
            name=f"{predictor}<br>ECE {curve.ece:.3f}, AUROC {curve.auroc:.3f}",
        )
    figure.update_xaxes(range=[-0.03, 1.03], tickformat=".0%")
    figure.update_yaxes(range=[-0.03, 1.05], tickformat=".0%")
    return figure.update_layout(legend_itemsizing="constant")
