"""A learning curve as an HTML page with plotly figures."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specheads.evaluation.intervals import Interval
from specheads.evaluation.learning_curve_report import NAME, Curve
from specheads.evaluation.number_text import percent, percent_limits, times, times_limits
from specheads.evaluation.page.figures import error_bars
from specheads.evaluation.plot_styles import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, SYMBOLS

COLORS = (RED, BLUE, GREEN, PURPLE, ORANGE, SKY)
PANELS = ("AUROC on test prompts", "speed-up over the target alone", "share of the gap to the informed ceiling")


def page_of(curves: Sequence[Curve]) -> str:
    """Return the figures of all curves as one HTML page."""
    figures = [figure_of(curve) for curve in curves]
    body = "".join(figure.to_html(full_html=False, include_plotlyjs=number == 0) for number, figure in enumerate(figures))
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{NAME.replace("_", " ")}</title>{body}'


def figure_of(curve: Curve) -> go.Figure:
    """Return three panels over the number of train prompts: AUROC, speed-up and share of the gap, a line per ratio."""
    figure = make_subplots(1, len(PANELS), subplot_titles=PANELS)
    counts = [point.num_prompts for point in curve.points]
    aurocs = [point.auroc for point in curve.points]
    _line(figure, 1, counts, aurocs, COLORS[-1], SYMBOLS[-1], "AUROC", [f"{estimate.value:.4f}" for estimate in aurocs])
    for number, ratio in enumerate(curve.points[0].winners):
        style = COLORS[number % len(COLORS)], SYMBOLS[number % len(SYMBOLS)], f"at ratio {ratio}"
        rows = [point.winners[ratio] for point in curve.points]
        speeds = [row.speedup for row in rows]
        _line(
            figure, 2, counts, speeds, *style, [f"{row.name}<br>{times(row.speedup)} {times_limits(row.speedup)}" for row in rows]
        )
        gaps = [row.gap_ceiling for row in rows]
        if None not in gaps:
            _line(figure, 3, counts, gaps, *style, [f"{percent(gap)} {percent_limits(gap)}" for gap in gaps])
    figure.update_xaxes(type="log", tickvals=counts, ticktext=[f"{count:,}" for count in counts], title="train prompts")
    figure.update_yaxes(tickformat=".0%", col=3)
    title = f"{curve.name}: heads by the number of their train prompts, {curve.points[0].num_steps:,} steps each"
    figure.update_layout(title=title, height=460, hovermode="closest", template="plotly_white")
    return figure


def _line(
    figure: go.Figure,
    panel: int,
    counts: Sequence[int],
    estimates: Sequence[Interval],
    color: str,
    symbol: str,
    name: str,
    texts: Sequence[str],
) -> None:
    """Add a line with its intervals to a panel; the legend names it once."""
    trace = go.Scatter(
        x=counts,
        y=[estimate.value for estimate in estimates],
        error_y=error_bars(estimates),
        mode="lines+markers",
        line={"color": color, "width": 2},
        marker={"color": color, "symbol": symbol, "size": 7},
        name=name,
        legendgroup=name,
        showlegend=panel < len(PANELS),
        hovertext=[f"<b>{count:,} prompts, {name}</b><br>{text}" for count, text in zip(counts, texts, strict=True)],
        hoverinfo="text",
    )
    figure.add_trace(trace, 1, panel)
