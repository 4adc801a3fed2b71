"""The page's figures: one plotly figure per data set, or per data set and ratio. The page colours their text and grid."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import plotly.graph_objects as go
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
from specheads.evaluation.report import BatchRow, DataSet, Positions, Report, RuleRow, Winner

# The colours of Okabe and Ito without yellow and black, which cannot be seen on a white and on a black page.
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY = "#8a8a8a"
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "pentagon", "star", "hexagon", "triangle-down")
FEW = 10  # families that are shown at once

T = TypeVar("T")


@dataclass(frozen=True)
class _PlotStyle:
    """How a family is drawn. plotly.js makes a CSS class of `key`, so it is no name from the data."""

    key: str
    color: str
    symbol: str
    dash: str = "solid"


def styles_of(report: Report) -> dict[str, _PlotStyle]:
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


ALL = "all"  # the key of the figure of all loads


def _not_beaten(rows: Iterable[T], costs: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the rows that no other row beats in both costs, by the first of them."""
    front: list[T] = []
    for row in sorted(rows, key=costs):
        if not front or costs(row)[1] < costs(front[-1])[1]:
            front.append(row)
    return front


def loads_of(report: Report) -> dict[str, dict[str, BatchRow]]:
    """Return the rows of batches by load and name; the best fixed length, another one for each load, has one name."""

    def name(row: BatchRow) -> str:
        return BEST_FIXED + row.family.removeprefix(FIXED) if row.rule_name == FIXED else row.name

    return {f"{table.concurrency} at once": {name(row): row for row in table.rows} for table in report.batches}


def _front_figures(report: Report) -> dict[str, go.Figure]:
    """Return total throughput against the speed of a request: a figure of all loads, and of each by its number.

    A setting looks the same in all of them.
    """
    loads, axes = loads_of(report), ("tokens per second and user", "tokens per second of all users", 440)
    figures = {ALL: _figure(*axes)}
    names = list(dict.fromkeys(name for rows in loads.values() for name in rows))
    for number, name in enumerate(names):
        shown = [(load, rows[name]) for load, rows in loads.items() if name in rows]
        figures[ALL].add_scatter(mode="lines+markers", **_front_trace(number, name, shown))
    for key, (load, rows) in enumerate(loads.items()):
        figure = figures[str(key)] = _figure(*axes)
        front = _not_beaten(rows.values(), lambda row: (-row.request_tokens_per_second, -row.tokens_per_second))
        line = {"color": GREY, "width": 1}
        x, y = [row.request_tokens_per_second for row in front], [row.tokens_per_second for row in front]
        figure.add_scatter(x=x, y=y, mode="lines", line=line, name="Pareto front", uid="front", hoverinfo="skip")
        for name, row in rows.items():
            figure.add_scatter(mode="markers", **_front_trace(names.index(name), name, [(load, row)]))
    return figures


def _front_trace(number: int, name: str, shown: Sequence[tuple[str, BatchRow]]) -> dict[str, object]:
    colors = (BLUE, ORANGE, GREEN, RED, SKY, PURPLE)
    color, symbol = colors[number % len(colors)], SYMBOLS[number // len(colors) % len(SYMBOLS)]
    users, totals = ([getattr(row, f"{of}tokens_per_second") for _, row in shown] for of in ("request_", ""))
    speeds = [f"{total:,.0f} tokens per second in all<br>{user:,.1f} per user" for user, total in zip(users, totals, strict=True)]
    return {
        "x": users,
        "y": totals,
        "marker": {"color": color, "symbol": symbol, "size": 9},
        "line": {"color": color, "width": 1.5, "dash": "solid" if all(row.lossless for _, row in shown) else "dash"},
        "name": escape(name),
        "uid": f"setting{number}",
        "hovertext": [f"<b>{escape(name)}</b>, {escape(load)}<br>{said}" for (load, _), said in zip(shown, speeds, strict=True)],
        "hoverinfo": "text",
    }


WORST, MOST = -1.0, 1.5  # shares of a gap beyond these are cut off

BEST_FIXED = "best fixed length"
DOUBTFUL = "doubtful"  # in the layout.meta of a figure that is not to be trusted

Figures = Mapping[str, go.Figure]  # by data set, or by data set and ratio: "0" or "0|measured"


def figures_of(report: Report) -> dict[str, Figures]:
    """Return every figure that there is data for, by name."""
    styles, ratios = styles_of(report), ratios_of(report)
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


def _doubtful(figure: go.Figure | None) -> go.Figure | None:
    """Return a figure with a remark that it is not to be trusted; the page greys it."""
    if figure is None:
        return None
    note = {"text": "measured,<br>not to be trusted", "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
    return figure.add_annotation(note | {"font": {"size": 15}, "opacity": 0.8}).update_layout(meta=DOUBTFUL)


def _pareto(report: Report, data_set: DataSet, styles: Mapping[str, _PlotStyle], main: set[str]) -> go.Figure | None:
    if not data_set.rules:
        return None
    figure = _figure(
        "discard rate: drafted tokens thrown away per token", "verification rate: forward passes of the target per token", 540
    )
    achieved = [row for row in data_set.rules if not row.bound]
    front = _not_beaten(achieved, lambda row: (row.discard_rate.value, row.verification_rate.value))
    figure.add_scatter(
        x=[row.discard_rate.value for row in front],
        y=[row.verification_rate.value for row in front],
        mode="lines",
        line={"color": GREY, "width": 1},
        name="Pareto front",
        hoverinfo="skip",
    )
    for family in dict.fromkeys(row.family for row in data_set.rules):
        rows = [row for row in data_set.rules if row.family == family]
        style = styles[family]
        figure.add_scatter(
            x=[row.discard_rate.value for row in rows],
            y=[row.verification_rate.value for row in rows],
            error_x=error_bars([row.discard_rate for row in rows]),
            error_y=error_bars([row.verification_rate for row in rows]),
            mode="markers",
            marker={"color": style.color, "symbol": style.symbol, "size": 8},
            hovertext=[_hover(report, row) for row in rows],
            **_named(family, style, main),
        )
    return figure


def _hover(report: Report, row: RuleRow) -> str:
    rates = (("discard rate", row.discard_rate), ("verification rate", row.verification_rate))
    lines = [f"<b>{escape(row.name)}</b>"]
    lines += [f"{name} {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}]" for name, rate in rates]
    lines += [f"speed-up at {ratio_text(report, ratio)}: {times(speedup)}" for ratio, speedup in row.speedup.items()]
    return "<br>".join(lines)


def _threshold(data_set: DataSet, ratio: str, styles: Mapping[str, _PlotStyle], main: set[str]) -> go.Figure | None:
    lines = _threshold_lines(data_set, ratio)
    if not lines:
        return None
    figure = _figure("threshold", "speed-up over the target alone", 500)
    for number, ((family, others), rows) in enumerate(lines.items()):
        rows = sorted(rows, key=lambda row: row.parameters["threshold"])
        style = styles[family]
        name = ", ".join((family, *(f"{key}={value}" for key, value in others)))
        named = _named(family, style, main) | {"name": escape(name), "uid": f"{style.key}-{number}"}
        figure.add_scatter(
            x=[row.parameters["threshold"] for row in rows],
            y=[row.speedup[ratio].value for row in rows],
            error_y=error_bars([row.speedup[ratio] for row in rows]),
            mode="lines+markers",
            line={"color": style.color, "width": 2 if family in main else 1.2},
            marker={"color": style.color, "symbol": style.symbol, "size": 7},
            hovertext=[f"<b>{escape(row.name)}</b><br>{times(row.speedup[ratio])}" for row in rows],
            **named,
        )
    shown = [row.parameters["threshold"] for (family, _), rows in lines.items() for row in rows if family in main]
    shown = shown or [row.parameters["threshold"] for rows in lines.values() for row in rows]
    for family in (FIXED, CEILING, ORACLE):
        _level(figure, data_set, ratio, family, styles[family], (min(shown), max(shown)))
    return figure


def _threshold_lines(data_set: DataSet, ratio: str) -> dict[tuple[str, tuple], list[RuleRow]]:
    """Return the rows that differ in their threshold only, by family and other parameters."""
    lines: dict[tuple[str, tuple], list[RuleRow]] = {}
    for row in data_set.rules:
        if "threshold" in row.parameters and ratio in row.speedup and not row.bound:
            others = tuple((key, str(value)) for key, value in row.parameters.items() if key != "threshold")
            lines.setdefault((row.family, others), []).append(row)
    return lines


def _level(figure: go.Figure, data_set: DataSet, ratio: str, family: str, style: _PlotStyle, limits: tuple[float, float]) -> None:
    """Draw a family's best speed-up as a horizontal line: its winner's, or that of its best rule where none was chosen."""
    speedups = [row.speedup for row in winners_at(data_set, ratio) if row.family == family]
    speedups = speedups or [row.speedup[ratio] for row in data_set.rules if row.family == family and ratio in row.speedup]
    if not speedups:
        return
    top = max(speedups, key=lambda estimate: estimate.value)
    name = {FIXED: BEST_FIXED}.get(family, family)
    figure.add_scatter(
        x=limits,
        y=[top.value] * 2,
        mode="lines",
        line={"color": style.color, "width": 1.8, "dash": style.dash if family != FIXED else "longdash"},
        name=f"{name}, {times(top).text}",
        uid=f"level-{style.key}",
        hovertext=f"<b>{name}</b><br>{times(top)}",
        hoverinfo="text",
    )


def _gap(data_set: DataSet, ratio: str) -> go.Figure | None:
    rows = [row for row in winners_at(data_set, ratio) if not row.bound and row.family != FIXED]
    rows = [row for row in rows if row.gap_ceiling or row.gap_oracle]
    if not rows:
        return None
    rows = rows[::-1]  # plotly counts upwards, and the best belongs on top
    figure = _figure("gap closed", "", 130 + 44 * len(rows))
    for name, title, color in (("gap_oracle", "to the oracle", SKY), ("gap_ceiling", "to the informed ceiling", BLUE)):
        with_gap = [row for row in rows if getattr(row, name) is not None]
        gaps = [getattr(row, name) for row in with_gap]
        figure.add_bar(
            y=[escape(row.family) for row in with_gap],
            x=[gap.value for gap in gaps],
            error_x=error_bars(gaps),
            orientation="h",
            marker={"color": color},
            name=title,
            hovertext=[_gap_hover(row, title, gap) for row, gap in zip(with_gap, gaps, strict=True)],
            hoverinfo="text",
        )
    figure.update_xaxes(tickformat=".0%", zeroline=True, range=_gap_range(rows))
    figure.update_yaxes(categoryorder="array", categoryarray=[escape(row.family) for row in rows], showgrid=False)
    figure.update_layout(barmode="group", bargap=0.3, bargroupgap=0.08, legend_traceorder="reversed")
    return figure


def _gap_range(rows: Sequence[Winner]) -> list[float]:
    gaps = [gap for row in rows for gap in (row.gap_ceiling, row.gap_oracle) if gap]
    low, high = max(WORST, min(0.0, *(gap.low for gap in gaps))), min(MOST, max(0.1, *(gap.high for gap in gaps)))
    return [low - 0.05 * (high - low), high + 0.05 * (high - low)]


def _gap_hover(row: Winner, title: str, gap: Interval) -> str:
    lines = [f"<b>{escape(row.name)}</b>", f"{percent(gap)} of the gap {title}"]
    return "<br>".join([*lines, f"{times(row.speedup).text}, {change(row.gain)} over the best fixed length"])


def _reliability(data_set: DataSet) -> go.Figure | None:
    if not data_set.reliability:
        return None
    figure = _figure("predicted chance of acceptance", "observed share accepted", 520)
    figure.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", line={"color": GREY, "dash": "dash", "width": 1}, name="calibrated", hoverinfo="skip"
    )
    for number, curve in enumerate(data_set.reliability):
        bins = list(zip(curve.share, curve.predicted, curve.observed, strict=True))
        hovers = [f"{share:.1%} of tokens<br>predicted {p:.1%}<br>accepted {observed:.1%}" for share, p, observed in bins]
        color = (RED, BLUE, GREEN, PURPLE, ORANGE, SKY)[number % 6]
        sizes = [5 + 30 * share**0.5 for share in curve.share]
        figure.add_scatter(
            x=list(curve.predicted),
            y=list(curve.observed),
            mode="lines+markers",
            line={"color": color, "width": 1.5},
            marker=_marks(color, SYMBOLS[number // 6], sizes, 0.75),
            name=f"{escape(curve.predictor)}<br>ECE {curve.ece:.3f}, AUROC {curve.auroc:.3f}",
            hovertext=[f"<b>{escape(curve.predictor)}</b><br>{text}" for text in hovers],
            hoverinfo="text",
        )
    figure.update_layout(legend_itemsizing="constant")
    figure.update_xaxes(range=[-0.03, 1.03], tickformat=".0%")
    figure.update_yaxes(range=[-0.03, 1.05], tickformat=".0%")
    return figure


def _positions(data_set: DataSet, styles: Mapping[str, _PlotStyle]) -> go.Figure | None:
    if not data_set.positions:
        return None
    figure = _figure("position in the round", "share accepted of those drafted", 440)
    longest = max(len(row.drafted) for row in data_set.positions)
    most = max(max(row.drafted, default=0) for row in data_set.positions)
    for row in data_set.positions:
        style = styles[row.family]
        counted = [(index, a, d) for index, (a, d) in enumerate(zip(row.accepted, row.drafted, strict=True), 1) if d]
        figure.add_scatter(
            x=[index for index, _, _ in counted],
            y=[accepted / drafted for _, accepted, drafted in counted],
            mode="lines+markers",
            line={"color": style.color, "width": 1.5, "dash": style.dash},
            marker=_marks(style.color, style.symbol, [4 + 8 * (d / most) ** 0.5 for *_, d in counted], 1),
            name=escape(row.name),
            hovertext=[f"<b>{escape(row.name)}</b>, token {i}<br>{a:,} of {d:,} accepted ({a / d:.1%})" for i, a, d in counted],
            hoverinfo="text",
        )
    figure.update_xaxes(tick0=1, dtick=1 if longest <= 12 else 2, range=[0.5, longest + 0.5])
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    figure.update_layout(legend_itemsizing="constant")
    return figure


def _marks(color: str, symbol: str, sizes: Sequence[float], opacity: float) -> dict[str, Any]:
    return {"color": color, "symbol": symbol, "size": sizes, "opacity": opacity, "line": {"width": 0}}


def _figure(x: str, y: str, height: int) -> go.Figure:
    axes = {
        axis: {"title": {"text": text, "font": {"size": 13}}, "automargin": True, "zeroline": False}
        for axis, text in (("xaxis", x), ("yaxis", y))
    }
    shown = {"height": height, "hovermode": "closest", "margin": {"l": 10, "r": 10, "t": 40, "b": 10}, "showlegend": True}
    return go.Figure(layout={"template": go.layout.Template(), **shown, **axes})


def error_bars(estimates: Sequence[Interval]) -> dict[str, Any]:
    """Return plotly's error bars of intervals."""
    return {
        "array": [estimate.high - estimate.value for estimate in estimates],
        "arrayminus": [estimate.value - estimate.low for estimate in estimates],
        "symmetric": False,
        "thickness": 1,
        "width": 2,
    }


def _named(family: str, style: _PlotStyle, main: set[str]) -> dict[str, Any]:
    """Return a trace's name in the legend, hidden at first where the family is not one of the main ones."""
    visible = True if family in main else "legendonly"
    return {"name": escape(family), "uid": style.key, "visible": visible, "hoverinfo": "text"}


_SHOWN = {  # families of the picture that the README has, with their colours and titles there
    FIXED: ("tab:blue", "fixed K"),
    "head_threshold": ("tab:orange", "head, threshold"),
    CEILING: ("tab:green", "informed ceiling"),
    ORACLE: ("0.4", "oracle"),
}


def plot_pareto(report: Report, path: Path) -> None:
    """Plot both rates of the main families on the first test set: the picture for a README."""
    data = next((data for data in report.data_sets if data.role == "test"), report.data_sets[0])
    figure, axes = _png(6.4, 4.8)
    for family, (color, title) in _SHOWN.items():
        rows = sorted((row for row in data.rules if row.family == family), key=lambda row: row.discard_rate.value)
        if not rows:
            continue
        pairs = [[getattr(row, name) for row in rows] for name in ("discard_rate", "verification_rate")]
        x, y = ([rate.value for rate in column] for column in pairs)
        errors = [_error_bars(column) for column in pairs]
        look: dict[str, Any] = {"marker": "o", "ms": 4, "lw": 1.2, "elinewidth": 0.6, "color": color, "label": title}
        axes.errorbar(x, y, xerr=errors[0], yerr=errors[1], **look)
        for row, point in zip(rows, zip(x, y, strict=True), strict=True):
            if row.value is not None and family != CEILING:
                below: dict[str, Any] = {"textcoords": "offset points", "xytext": (5, 4), "fontsize": 8}
                axes.annotate(f"{row.value:g}", point, **below, color=color)
    axes.set(
        xlabel="discard rate (drafted tokens thrown away per token)",
        ylabel="verification rate (forward passes of the target per token)",
    )
    axes.set_title(f"{report.context['model']}, {data.name} prompts: lower left is better")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def plot_speed(report: Report, path: Path) -> None:
    """Plot the measured speed of every setting, next to what costs and replay predict."""
    figure, axes = _png(7.2, 4.4)
    names, speeds = [row.name for row in report.live], [row.tokens_per_second for row in report.live]
    axes.bar(
        names,
        [speed.value for speed in speeds],
        yerr=_error_bars(speeds),
        color="0.75" if report.doubts else "tab:blue",
        capsize=2,
        error_kw={"lw": 0.8},
    )
    for attribute, marker, label in (("predicted", "k_", "from its counts"), ("replayed", "r_", "from replay")):
        values = [(row.name, getattr(row, f"{attribute}_tokens_per_second")) for row in report.live]
        known = [pair for pair in values if pair[1] is not None]
        if known:
            axes.plot(*zip(*known, strict=True), marker, ms=12, label=f"predicted {label}")
    axes.axhline(speeds[0].value, color="0.5", lw=0.8, ls="--")
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{report.context['model']}: measured speed{', not to be trusted' if report.doubts else ''}")
    axes.tick_params(axis="x", labelrotation=60)
    axes.legend()
    figure.savefig(path, dpi=150)


def _error_bars(estimates: Sequence[Interval]) -> np.ndarray:
    """Return how far the intervals reach below and above their estimates, (2, n)."""
    return np.array([[abs(estimate.value - estimate.low), abs(estimate.high - estimate.value)] for estimate in estimates]).T


def _png(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()
