"""The page's figures: one plotly figure per data set, or per data set and ratio. The page colours their text and grid."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple, TypeVar

import plotly.graph_objects as go

from specheads.evaluation.candidates import CEILING, FIXED, ORACLE
from specheads.evaluation.conclusions import (
    best,
    change,
    is_trusted,
    percent,
    preferred,
    ratio_text,
    ratios_of,
    times,
    winners_at,
)
from specheads.evaluation.intervals import Interval
from specheads.evaluation.report import BatchRow, DataSet, Positions, Report, RuleRow
from specheads.evaluation.tables import BEST_FIXED, loads_of

# The colours of Okabe and Ito without yellow and black, which cannot be seen on a white and on a black page.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#8a8a8a"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "pentagon", "star", "hexagon", "triangle-down")
FEW = 10  # families that are shown at once
WORST, MOST = -1.0, 1.5  # shares of a gap beyond these are cut off
ALL = "all"  # the key of the figure of all loads
DOUBTFUL = "doubtful"  # in the layout.meta of a figure that is not to be trusted

Figures = Mapping[str, go.Figure]  # by data set, or by data set and ratio: "0" or "0|measured"
T = TypeVar("T")


class _PlotStyle(NamedTuple):
    """How a family is drawn. plotly.js makes a CSS class of `key`, so it is no name from the data."""

    key: str
    color: str
    symbol: str
    dash: str = "solid"

    def marker(self, size: float | Sequence[float], **more: Any) -> dict[str, Any]:
        return {"color": self.color, "symbol": self.symbol, "size": size, **more}


Styles = Mapping[str, _PlotStyle]


def figures_of(report: Report) -> dict[str, Figures]:
    """Return every figure that there is data for, by name."""
    styles, ratios = _styles_of(report), ratios_of(report)
    drawn: dict[str, dict[str, go.Figure | None]] = {"pareto": {}, "threshold": {}, "gap": {}, "reliability": {}, "positions": {}}
    for number, data_set in enumerate(report.data_sets):
        main = _main_families(data_set, preferred(ratios))
        drawn["pareto"][f"{number}"] = _pareto(report, data_set, styles, main)
        drawn["reliability"][f"{number}"] = _reliability(data_set)
        drawn["positions"][f"{number}"] = _positions(data_set, styles)
        for ratio in ratios:
            for name, figure in (("threshold", _threshold(data_set, ratio, styles, main)), ("gap", _gap(data_set, ratio))):
                drawn[name][f"{number}|{ratio}"] = figure if is_trusted(report, ratio) else _doubtful(figure)
    if report.batches:
        fronts = _front_figures(report).items()
        drawn["batches"] = {key: _doubtful(figure) if report.doubts else figure for key, figure in fronts}
    shown = {name: {key: figure for key, figure in figures.items() if figure} for name, figures in drawn.items()}
    return {name: figures for name, figures in shown.items() if figures}


def _styles_of(report: Report) -> Styles:
    """Return how each family is drawn: fixed lengths blue, heads red and purple, the bounds grey."""
    styles = {
        FIXED: _PlotStyle("fixed", BLUE, "circle"),
        CEILING: _PlotStyle("ceiling", GREY, "star-diamond", "dash"),
        ORACLE: _PlotStyle("oracle", GREY, "star", "dot"),
    }
    rows: list[RuleRow | Positions] = []
    for data_set in report.data_sets:
        rows += [*data_set.rules, *data_set.positions]
    families = {row.family: row.head is not None for row in rows if row.family not in styles}
    for wanted, colors in ((True, (RED, PURPLE)), (False, (GREEN, ORANGE, SKY))):
        for number, family in enumerate(family for family, has_head in families.items() if has_head == wanted):
            symbol = SYMBOLS[(number // len(colors) + (not wanted)) % len(SYMBOLS)]
            styles[family] = _PlotStyle(f"family{list(families).index(family)}", colors[number % len(colors)], symbol)
    return styles


def _main_families(data_set: DataSet, ratio: str | None) -> set[str]:
    """Return the families that a reader sees first: fixed lengths, the best with a head and without, and the bounds.

    With an automatic threshold, its head's given thresholds are shown, too.
    """
    families = {row.family for row in data_set.rules}
    if len(families) <= FEW:
        return families
    leaders = [best(winners_at(data_set, ratio), head) for head in (True, False)]
    leading = {(row.rule_name, row.head) for row in leaders if row}
    return {FIXED, CEILING, ORACLE, *(row.family for row in data_set.rules if (row.rule_name, row.head) in leading)}


def _not_beaten(rows: Iterable[T], costs: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the rows that no other row beats in both costs, by the first of them."""
    front: list[T] = []
    for row in sorted(rows, key=costs):
        if not front or costs(row)[1] < costs(front[-1])[1]:
            front.append(row)
    return front


def _figure(x: str, y: str, height: int) -> go.Figure:
    axes = {
        axis: {"title": {"text": text, "font": {"size": 13}}, "automargin": True, "zeroline": False}
        for axis, text in (("xaxis", x), ("yaxis", y))
    }
    shown = {"height": height, "hovermode": "closest", "margin": {"l": 10, "r": 10, "t": 40, "b": 10}, "showlegend": True}
    return go.Figure(layout={"template": go.layout.Template(), **shown, **axes})


def _draw(
    figure: go.Figure, x: Sequence[Any], y: Sequence[Any], hover: str | Sequence[str] | None = None, **look: Any
) -> go.Figure:
    """Add a trace, of intervals with error bars; without `hover` its points say nothing."""
    trace: dict[str, Any] = {"hoverinfo": "skip" if hover is None else "text", "hovertext": hover, "x": x, "y": y}
    for axis, values in (("x", x), ("y", y)):
        if values and all(isinstance(value, Interval) for value in values):
            trace[axis] = [each.value for each in values]
            limits = {
                "array": [each.high - each.value for each in values],
                "arrayminus": [each.value - each.low for each in values],
            }
            trace[f"error_{axis}"] = {**limits, "symmetric": False, "thickness": 1, "width": 2}
    add = figure.add_bar if "orientation" in look else figure.add_scatter
    return add(**trace, **look)


def _doubtful(figure: go.Figure | None) -> go.Figure | None:
    """Return a figure with a remark that it is not to be trusted; the page greys it."""
    if figure is None:
        return None
    note = {"text": "measured,<br>not to be trusted", "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
    return figure.add_annotation(note | {"font": {"size": 15}, "opacity": 0.8}).update_layout(meta=DOUBTFUL)


def _named(family: str, style: _PlotStyle, main: set[str]) -> dict[str, Any]:
    """Return a trace's name in the legend, hidden at first where the family is not one of the main ones."""
    return {"name": escape(family), "uid": style.key, "visible": True if family in main else "legendonly"}


def _pareto(report: Report, data_set: DataSet, styles: Styles, main: set[str]) -> go.Figure | None:
    if not data_set.rules:
        return None
    axes = "discard rate: drafted tokens thrown away per token", "verification rate: forward passes of the target per token"
    figure = _figure(*axes, 540)
    achieved = [row for row in data_set.rules if not row.bound]
    front = _not_beaten([(row.discard_rate.value, row.verification_rate.value) for row in achieved], lambda rates: rates)
    x, y = zip(*front, strict=True) if front else ((), ())
    _draw(figure, x, y, mode="lines", line={"color": GREY, "width": 1}, name="Pareto front")
    for family in dict.fromkeys(row.family for row in data_set.rules):
        rows, style = [row for row in data_set.rules if row.family == family], styles[family]
        rates = [row.discard_rate for row in rows], [row.verification_rate for row in rows]
        hover = [_hover(report, row) for row in rows]
        _draw(figure, *rates, hover, mode="markers", marker=style.marker(8), **_named(family, style, main))
    return figure


def _hover(report: Report, row: RuleRow) -> str:
    rates = (("discard rate", row.discard_rate), ("verification rate", row.verification_rate))
    lines = [f"<b>{escape(row.name)}</b>"]
    lines += [f"{name} {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}]" for name, rate in rates]
    lines += [f"speed-up at {ratio_text(report, ratio)}: {times(speedup)}" for ratio, speedup in row.speedup.items()]
    return "<br>".join(lines)


def _threshold(data_set: DataSet, ratio: str, styles: Styles, main: set[str]) -> go.Figure | None:
    lines: dict[tuple[str, tuple], list[RuleRow]] = {}  # rows that differ in their threshold only
    for row in data_set.rules:
        if "threshold" in row.parameters and ratio in row.speedup and not row.bound:
            others = tuple((key, str(value)) for key, value in row.parameters.items() if key != "threshold")
            lines.setdefault((row.family, others), []).append(row)
    if not lines:
        return None
    figure = _figure("threshold", "speed-up over the target alone", 500)
    for number, ((family, others), rows) in enumerate(lines.items()):
        rows.sort(key=lambda row: row.parameters["threshold"])
        style, speeds = styles[family], [row.speedup[ratio] for row in rows]
        name = ", ".join((family, *(f"{key}={value}" for key, value in others)))
        look = _named(family, style, main) | {"name": escape(name), "uid": f"{style.key}-{number}", "marker": style.marker(7)}
        look["line"] = {"color": style.color, "width": 2 if family in main else 1.2}
        hover = [f"<b>{escape(row.name)}</b><br>{times(speed)}" for row, speed in zip(rows, speeds, strict=True)]
        _draw(figure, [row.parameters["threshold"] for row in rows], speeds, hover, mode="lines+markers", **look)
    shown = [row for (family, _), rows in lines.items() for row in rows if family in main]
    thresholds = [row.parameters["threshold"] for row in shown or [row for rows in lines.values() for row in rows]]
    for family in (FIXED, CEILING, ORACLE):
        _level(figure, data_set, ratio, family, styles[family], (min(thresholds), max(thresholds)))
    return figure


def _level(figure: go.Figure, data_set: DataSet, ratio: str, family: str, style: _PlotStyle, limits: tuple[float, float]) -> None:
    """Draw a family's best speed-up as a horizontal line: its winner's, or that of its best rule where none was chosen."""
    speedups = [row.speedup for row in winners_at(data_set, ratio) if row.family == family]
    speedups = speedups or [row.speedup[ratio] for row in data_set.rules if row.family == family and ratio in row.speedup]
    if not speedups:
        return
    top, name = max(speedups, key=lambda estimate: estimate.value), {FIXED: BEST_FIXED}.get(family, family)
    look: dict[str, Any] = {"name": f"{name}, {times(top).text}", "uid": f"level-{style.key}", "mode": "lines"}
    look["line"] = {"color": style.color, "width": 1.8, "dash": style.dash if family != FIXED else "longdash"}
    _draw(figure, limits, [top.value] * 2, f"<b>{name}</b><br>{times(top)}", **look)


def _gap(data_set: DataSet, ratio: str) -> go.Figure | None:
    rows = [row for row in winners_at(data_set, ratio) if not row.bound and row.family != FIXED]
    rows = [row for row in rows if row.gap_ceiling or row.gap_oracle][::-1]  # plotly counts upwards, and the best is on top
    if not rows:
        return None
    figure = _figure("gap closed", "", 130 + 44 * len(rows))
    for key, title, color in (("gap_oracle", "to the oracle", SKY), ("gap_ceiling", "to the informed ceiling", BLUE)):
        gaps = {row: gap for row in rows if (gap := getattr(row, key)) is not None}
        hover = [
            f"<b>{escape(row.name)}</b><br>{percent(gap)} of the gap {title}<br>{times(row.speedup).text}, {change(row.gain)} "
            "over the best fixed length"
            for row, gap in gaps.items()
        ]
        look: dict[str, Any] = {"orientation": "h", "marker": {"color": color}, "name": title}
        _draw(figure, list(gaps.values()), [escape(row.family) for row in gaps], hover, **look)
    every = [gap for row in rows for gap in (row.gap_ceiling, row.gap_oracle) if gap]
    low, high = max(WORST, min(0.0, *(gap.low for gap in every))), min(MOST, max(0.1, *(gap.high for gap in every)))
    margin = 0.05 * (high - low)
    figure.update_xaxes(tickformat=".0%", zeroline=True, range=[low - margin, high + margin])
    figure.update_yaxes(categoryorder="array", categoryarray=[escape(row.family) for row in rows], showgrid=False)
    return figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.08, legend_traceorder="reversed")


def _reliability(data_set: DataSet) -> go.Figure | None:
    if not data_set.reliability:
        return None
    figure = _figure("predicted chance of acceptance", "observed share accepted", 520)
    _draw(figure, [0, 1], [0, 1], mode="lines", line={"color": GREY, "dash": "dash", "width": 1}, name="calibrated")
    for number, curve in enumerate(data_set.reliability):
        style = _PlotStyle("", (RED, BLUE, GREEN, PURPLE, ORANGE, SKY)[number % 6], SYMBOLS[number // 6])
        hover = [
            f"<b>{escape(curve.predictor)}</b><br>{share:.1%} of tokens<br>predicted {p:.1%}<br>accepted {observed:.1%}"
            for share, p, observed in zip(curve.share, curve.predicted, curve.observed, strict=True)
        ]
        marker = style.marker([5 + 30 * share**0.5 for share in curve.share], opacity=0.75, line={"width": 0})
        look: dict[str, Any] = {"mode": "lines+markers", "line": {"color": style.color, "width": 1.5}, "marker": marker}
        look["name"] = f"{escape(curve.predictor)}<br>ECE {curve.ece:.3f}, AUROC {curve.auroc:.3f}"
        _draw(figure, list(curve.predicted), list(curve.observed), hover, **look)
    figure.update_xaxes(range=[-0.03, 1.03], tickformat=".0%")
    figure.update_yaxes(range=[-0.03, 1.05], tickformat=".0%")
    return figure.update_layout(legend_itemsizing="constant")


def _positions(data_set: DataSet, styles: Styles) -> go.Figure | None:
    if not data_set.positions:
        return None
    figure = _figure("position in the round", "share accepted of those drafted", 440)
    longest = max(len(row.drafted) for row in data_set.positions)
    most = max(max(row.drafted, default=0) for row in data_set.positions)
    for row in data_set.positions:
        style, name = styles[row.family], escape(row.name)
        counted = [(place, a, d) for place, (a, d) in enumerate(zip(row.accepted, row.drafted, strict=True), 1) if d]
        hover = [f"<b>{name}</b>, token {place}<br>{a:,} of {d:,} accepted ({a / d:.1%})" for place, a, d in counted]
        marker = style.marker([4 + 8 * (d / most) ** 0.5 for *_, d in counted], opacity=1, line={"width": 0})
        look = {"mode": "lines+markers", "line": {"color": style.color, "width": 1.5, "dash": style.dash}, "marker": marker}
        _draw(figure, [place for place, *_ in counted], [a / d for _, a, d in counted], hover, name=name, **look)
    figure.update_xaxes(tick0=1, dtick=1 if longest <= 12 else 2, range=[0.5, longest + 0.5])
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return figure.update_layout(legend_itemsizing="constant")


def _front_figures(report: Report) -> dict[str, go.Figure]:
    """Return total throughput against the speed of a request: a figure of all loads, and of each by its number.

    A setting looks the same in all of them.
    """
    loads, axes = loads_of(report), ("tokens per second and user", "tokens per second of all users", 440)
    figures = {ALL: _figure(*axes)}
    names = list(dict.fromkeys(name for rows in loads.values() for name in rows))
    for number, name in enumerate(names):
        shown = [(load, rows[name]) for load, rows in loads.items() if name in rows]
        _draw_setting(figures[ALL], number, name, shown, "lines+markers")
    for key, (load, rows) in enumerate(loads.items()):
        figure = figures[str(key)] = _figure(*axes)
        speeds = [(row.request_tokens_per_second, row.tokens_per_second) for row in rows.values()]
        x, y = zip(*_not_beaten(speeds, lambda pair: (-pair[0], -pair[1])), strict=True)
        _draw(figure, x, y, mode="lines", line={"color": GREY, "width": 1}, name="Pareto front", uid="front")
        for name, row in rows.items():
            _draw_setting(figure, names.index(name), name, [(load, row)], "markers")
    return figures


def _draw_setting(figure: go.Figure, number: int, name: str, shown: Sequence[tuple[str, BatchRow]], mode: str) -> None:
    """Draw a setting at some loads."""
    colors = (BLUE, ORANGE, GREEN, RED, SKY, PURPLE)
    style = _PlotStyle("", colors[number % len(colors)], SYMBOLS[number // len(colors) % len(SYMBOLS)])
    users, totals = ([getattr(row, f"{of}tokens_per_second") for _, row in shown] for of in ("request_", ""))
    hover = [
        f"<b>{escape(name)}</b>, {escape(load)}<br>{total:,.0f} tokens per second in all<br>{user:,.1f} per user"
        for (load, _), user, total in zip(shown, users, totals, strict=True)
    ]
    dash = "solid" if all(row.lossless for _, row in shown) else "dash"
    look = {"marker": style.marker(9), "line": {"color": style.color, "width": 1.5, "dash": dash}, "uid": f"setting{number}"}
    _draw(figure, users, totals, hover, mode=mode, name=escape(name), **look)
