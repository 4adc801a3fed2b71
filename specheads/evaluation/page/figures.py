"""The page's figures: one plotly figure per data set, or per data set and ratio.

The page colours their text and grid.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import plotly.graph_objects as go

from specheads.evaluation.candidates import CEILING, FIXED, ORACLE
from specheads.evaluation.conclusions import (
    fastest_by_kind,
    preferred,
    ratio_text,
    ratios_of,
    times,
    winners_at,
)
from specheads.evaluation.report import DataSet, Kind, Report, RuleRow
from specheads.replay.intervals import Interval

# The colours of Okabe and Ito without yellow and black, which cannot be seen on a white and on a
# black page.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
)
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

Figures = Mapping[
    str, go.Figure
]  # by the number of a data set, "0", or by that and a ratio, "0 10"


class _PlotStyle(NamedTuple):
    """How a family is drawn.

    Plotly.js makes a CSS class of `key`, so it is no name from the data.
    """

    key: str
    color: str
    symbol: str

    def marker(self, size: float | Sequence[float], **more: Any) -> dict[str, Any]:
        return {"color": self.color, "symbol": self.symbol, "size": size, **more}


def figures_of(report: Report) -> dict[str, Figures]:
    """Return every figure that there is data for, by name."""
    styles = _styles_of(report)
    ratios = ratios_of(report)
    drawn: dict[str, dict[str, go.Figure]] = {"speed": {}, "pareto": {}, "reliability": {}}
    for number, data_set in enumerate(report.data_sets):
        main = _main_families(data_set, preferred(ratios))
        if data_set.rules:
            drawn["pareto"][f"{number}"] = _pareto(report, data_set, styles, main)
        for ratio in ratios:
            if winners_at(data_set, ratio) and any(
                "threshold" in row.parameters for row in data_set.rules
            ):
                drawn["speed"][f"{number} {ratio}"] = _speed(report, data_set, ratio, styles)
        if data_set.reliability:
            drawn["reliability"][f"{number}"] = _reliability(data_set)
    return {name: figures for name, figures in drawn.items() if figures}


def _styles_of(report: Report) -> Mapping[str, _PlotStyle]:
    """Return how each family is drawn: fixed lengths blue, heads red and purple, the bounds
    grey.
    """
    styles = {
        FIXED: _PlotStyle("fixed", BLUE, "circle"),
        CEILING: _PlotStyle("ceiling", GREY, "star-diamond"),
        ORACLE: _PlotStyle("oracle", GREY, "star"),
    }
    kinds: dict[bool, list[tuple[str, str | None]]] = {
        True: [],
        False: [],
    }  # with a head, and without
    for row in (
        row for data_set in report.data_sets for row in data_set.rules if row.family not in styles
    ):
        kind = (row.rule_name, row.head)
        known = kinds[row.head is not None]
        colors = OF_HEADS if row.head else OF_OTHERS
        known += [] if kind in known else [kind]
        number = known.index(kind)  # what an automatic value belongs to has its colour
        symbol = SYMBOLS[(number + 5 * row.automatic) % len(SYMBOLS)]
        styles[row.family] = _PlotStyle(
            f"family{len(styles)}", colors[number % len(colors)], symbol
        )
    return styles


def _main_families(data_set: DataSet, ratio: str | None) -> set[str]:
    """Return the families that a reader sees first: fixed lengths, the best rule without a head,
    the best head's, the bounds.
    """
    fastest = fastest_by_kind(winners_at(data_set, ratio))
    leading = {(row.rule_name, row.head) for row in fastest.values()}
    leading |= {("head_threshold", fastest[Kind.HEAD].head)} if Kind.HEAD in fastest else set()
    return {
        FIXED,
        CEILING,
        ORACLE,
        *(row.family for row in data_set.rules if (row.rule_name, row.head) in leading),
    }


def _speed(
    report: Report, data_set: DataSet, ratio: str, styles: Mapping[str, _PlotStyle]
) -> go.Figure:
    """Return speed-ups at a ratio by threshold.

    Of several rules with one threshold, of the fastest on dev prompts.
    """
    figure = _figure(
        "threshold", f"speed-up at ratio {ratio_text(report, ratio)}: times the target alone", 480
    )
    fixed = fastest_by_kind(winners_at(data_set, ratio))[Kind.FIXED]
    main = _main_families(data_set, ratio)
    dev = next((each.rules for each in report.data_sets if each.role == "dev"), data_set.rules)
    lines: dict[str, dict[float, tuple[float, RuleRow]]] = {}
    for row, on_dev in zip(data_set.rules, dev, strict=True):
        if ratio in row.speedup and "threshold" in row.parameters and not row.bound:
            points = lines.setdefault(row.family, {})
            threshold = row.parameters["threshold"]
            tried = (on_dev.speedup[ratio].value, row)
            points[threshold] = max(points.get(threshold, tried), tried, key=lambda point: point[0])
    for family, points in lines.items():
        rows = {threshold: points[threshold][1] for threshold in sorted(points)}
        style = styles[family]
        look = {
            "mode": "lines+markers",
            "marker": style.marker(8),
            "line": {"color": style.color, "width": 1.5},
        }
        hover = [_hover(report, row) for row in rows.values()]
        speeds = [row.speedup[ratio] for row in rows.values()]
        _draw(figure, list(rows), speeds, hover, **look, **_named(family, style, main))
    for name, speed, color in ((Kind.FIXED, fixed.speedup.value, BLUE), (Kind.ALONE, 1.0, GREY)):
        _draw(
            figure,
            [0, 1],
            [speed, speed],
            mode="lines",
            line={"color": color, "dash": "dash", "width": 1.5},
            name=name,
        )
    return figure.update_xaxes(range=[-0.03, 1.03])


def _figure(x: str, y: str, height: int) -> go.Figure:
    axes = {
        axis: {"title": {"text": text, "font": {"size": 13}}, "automargin": True, "zeroline": False}
        for axis, text in (("xaxis", x), ("yaxis", y))
    }
    shown = {
        "height": height,
        "hovermode": "closest",
        "margin": {"l": 10, "r": 10, "t": 40, "b": 10},
        "showlegend": True,
    }
    return go.Figure(layout={"template": go.layout.Template(), **shown, **axes})


def _draw(
    figure: go.Figure,
    x: Sequence[Any],
    y: Sequence[Any],
    hover: str | Sequence[str] | None = None,
    **look: Any,
) -> go.Figure:
    """Add a trace, of intervals with error bars; without `hover` its points say nothing."""
    trace: dict[str, Any] = {
        "hoverinfo": "skip" if hover is None else "text",
        "hovertext": hover,
        "x": x,
        "y": y,
    }
    for axis, values in (("x", x), ("y", y)):
        if values and all(isinstance(value, Interval) for value in values):
            trace[axis] = [each.value for each in values]
            limits = {
                "array": [each.high - each.value for each in values],
                "arrayminus": [each.value - each.low for each in values],
            }
            trace[f"error_{axis}"] = {**limits, "symmetric": False, "thickness": 1, "width": 2}
    return figure.add_scatter(**trace, **look)


def _named(family: str, style: _PlotStyle, main: set[str]) -> dict[str, Any]:
    """Return a trace's name in the legend, hidden at first where the family is not one of the main
    ones.
    """
    return {
        "name": escape(family),
        "uid": style.key,
        "visible": True if family in main else "legendonly",
    }


def _pareto(
    report: Report, data_set: DataSet, styles: Mapping[str, _PlotStyle], main: set[str]
) -> go.Figure:
    axes = (
        "discard rate: drafted tokens thrown away per token",
        "verification rate: forward passes of the target per token",
    )
    figure = _figure(*axes, 540)
    front: list[tuple[float, float]] = []
    for point in sorted(
        (row.discard_rate.value, row.verification_rate.value)
        for row in data_set.rules
        if not row.bound
    ):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    x = [x for x, _ in front]
    y = [y for _, y in front]
    _draw(figure, x, y, mode="lines", line={"color": GREY, "width": 1}, name="Pareto front")
    for family in dict.fromkeys(row.family for row in data_set.rules):
        rows = [row for row in data_set.rules if row.family == family]
        style = styles[family]
        rates = [row.discard_rate for row in rows], [row.verification_rate for row in rows]
        hover = [_hover(report, row) for row in rows]
        _draw(
            figure,
            *rates,
            hover,
            mode="markers",
            marker=style.marker(8),
            **_named(family, style, main),
        )
    return figure


def _hover(report: Report, row: RuleRow) -> str:
    rates = (("discard rate", row.discard_rate), ("verification rate", row.verification_rate))
    lines = [f"<b>{escape(row.name)}</b>"]
    lines += [f"{name} {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}]" for name, rate in rates]
    lines += [
        f"speed-up at {ratio_text(report, ratio)}: {times(speedup)}"
        for ratio, speedup in row.speedup.items()
    ]
    return "<br>".join(lines)


def _reliability(data_set: DataSet) -> go.Figure:
    figure = _figure("predicted chance of acceptance", "observed share accepted", 520)
    _draw(
        figure,
        [0, 1],
        [0, 1],
        mode="lines",
        line={"color": GREY, "dash": "dash", "width": 1},
        name="calibrated",
    )
    for number, curve in enumerate(data_set.reliability):
        style = _PlotStyle(
            "", (RED, BLUE, GREEN, PURPLE, ORANGE, SKY)[number % 6], SYMBOLS[number // 6]
        )
        hover = [
            f"<b>{escape(curve.predictor)}</b><br>{share:.1%} of tokens<br>predicted"
            f" {p:.1%}<br>accepted {observed:.1%}"
            for share, p, observed in zip(curve.share, curve.predicted, curve.observed, strict=True)
        ]
        marker = style.marker(
            [5 + 30 * share**0.5 for share in curve.share], opacity=0.75, line={"width": 0}
        )
        look: dict[str, Any] = {
            "mode": "lines+markers",
            "line": {"color": style.color, "width": 1.5},
            "marker": marker,
        }
        look["name"] = f"{escape(curve.predictor)}<br>ECE {curve.ece:.3f}, AUROC {curve.auroc:.3f}"
        _draw(figure, list(curve.predicted), list(curve.observed), hover, **look)
    figure.update_xaxes(range=[-0.03, 1.03], tickformat=".0%")
    figure.update_yaxes(range=[-0.03, 1.05], tickformat=".0%")
    return figure.update_layout(legend_itemsizing="constant")
