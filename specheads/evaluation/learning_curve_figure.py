"""A learning curve as an HTML page with plotly figures."""

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specheads.evaluation.conclusions import percent, percent_limits, times, times_limits
from specheads.evaluation.intervals import Interval
from specheads.evaluation.learning_curve_report import Curve
from specheads.evaluation.page.figures import error_bars
from specheads.evaluation.plot_styles import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, SYMBOLS

COLORS = (RED, BLUE, GREEN, PURPLE, ORANGE, SKY)
PANELS = ("AUROC on test prompts", "speed-up over the target alone", "share of the gap to the informed ceiling")


@dataclass(frozen=True)
class Line:
    """How the line of one quantity is drawn in every panel."""

    name: str
    color: str
    symbol: str
    counts: Sequence[int]  # numbers of train prompts

    def trace(self, estimates: Sequence[Interval], texts: Sequence[str]) -> go.Scatter:
        """Return the line through estimates, with their intervals and a text for each point."""
        hovertexts = [f"<b>{count:,} prompts, {self.name}</b><br>{text}" for count, text in zip(self.counts, texts, strict=True)]
        return go.Scatter(
            x=self.counts,
            y=[estimate.value for estimate in estimates],
            error_y=error_bars(estimates),
            mode="lines+markers",
            line={"color": self.color, "width": 2},
            marker={"color": self.color, "symbol": self.symbol, "size": 7},
            name=self.name,
            legendgroup=self.name,
            hovertext=hovertexts,
            hoverinfo="text",
        )


def page_of(curves: Sequence[Curve]) -> str:
    """Return the figures of all curves as one HTML page."""
    figures = [figure_of(curve) for curve in curves]
    body = "".join(figure.to_html(full_html=False, include_plotlyjs=number == 0) for number, figure in enumerate(figures))
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>learning curve</title>{body}'


def figure_of(curve: Curve) -> go.Figure:
    """Return three panels over the number of train prompts: AUROC, speed-up and share of the gap, a line per ratio."""
    figure = make_subplots(1, len(PANELS), subplot_titles=PANELS)
    counts = [point.num_prompts for point in curve.points]
    aurocs = [point.auroc for point in curve.points]
    auroc_line = Line("AUROC", COLORS[-1], SYMBOLS[-1], counts)
    figure.add_trace(auroc_line.trace(aurocs, [f"{auroc.value:.4f}" for auroc in aurocs]), 1, 1)
    for number, ratio in enumerate(curve.points[0].winners):
        line = Line(f"at ratio {ratio}", COLORS[number % len(COLORS)], SYMBOLS[number % len(SYMBOLS)], counts)
        rows = [point.winners[ratio] for point in curve.points]
        texts = [f"{row.name}<br>{times(row.speedup)} {times_limits(row.speedup)}" for row in rows]
        figure.add_trace(line.trace([row.speedup for row in rows], texts), 1, 2)
        gaps = [row.gap_ceiling for row in rows if row.gap_ceiling is not None]
        if len(gaps) == len(rows):
            texts = [f"{percent(gap)} {percent_limits(gap)}" for gap in gaps]
            figure.add_trace(line.trace(gaps, texts).update(showlegend=False), 1, 3)
    figure.update_xaxes(type="log", tickvals=counts, ticktext=[f"{count:,}" for count in counts], title="train prompts")
    figure.update_yaxes(tickformat=".0%", col=3)
    title = f"{curve.name}: heads by the number of their train prompts, {curve.points[0].num_steps:,} steps each"
    figure.update_layout(title=title, height=460, hovermode="closest", template="plotly_white")
    return figure
