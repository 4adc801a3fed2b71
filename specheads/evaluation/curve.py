"""A learning curve as records, as a table on the console, and as learning_curve.json, .csv and .html."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich.console import Console
from rich.table import Table

from specheads.evaluation.figures import error_bars
from specheads.evaluation.findings import percent, percent_limits, preferred, times, times_limits
from specheads.evaluation.intervals import Interval
from specheads.evaluation.looks import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, SYMBOLS
from specheads.evaluation.report import write_rows
from specheads.evaluation.results import Winner
from specheads.storage.files import write_json, write_whole

NAME = "learning_curve"
COLORS = (RED, BLUE, GREEN, PURPLE, ORANGE, SKY)
PANELS = ("AUROC on test prompts", "speed-up over the target alone", "share of the gap to the informed ceiling")


@dataclass(frozen=True)
class Point:
    """What a head is worth that learnt from one share of the train prompts."""

    share: float
    num_prompts: int  # train prompts
    num_responses: int  # to them
    num_epochs: int
    num_steps: int  # the same for all heads of a curve
    head: str  # its folder
    auroc: Interval
    kl: Interval  # nats
    winners: Mapping[str, Winner]  # by ratio: the head's best rule on dev prompts, judged on test prompts


@dataclass(frozen=True)
class Curve:
    """The heads of all shares on one set of test prompts, the smallest share first."""

    name: str
    num_prompts: int  # test prompts
    points: Sequence[Point]
    last_step: Interval | None  # what the AUROC gained from the last share but one to the last; None for a single share


def print_curve(curve: Curve, console: Console | None = None) -> None:
    """Print a curve as a table, and what its last step says of more prompts."""
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    table = Table(
        title=f"{curve.name}: {curve.num_prompts} prompts replayed; speed-up, and share of the gap to the ceiling, oracle"
    )
    for column in ("train prompts", "epochs", "AUROC", "KL"):
        table.add_column(column, justify="right", no_wrap=True)
    for ratio in curve.points[0].winners:
        table.add_column(f"at {ratio}", justify="right", no_wrap=True)
    for point in curve.points:
        errors = [f"{one.value:.4f} \u00b1{(one.high - one.low) / 2:.4f}" for one in (point.auroc, point.kl)]
        table.add_row(f"{point.num_prompts:,}", f"{point.num_epochs}", *errors, *map(_cell, point.winners.values()))
    console.print(table)
    if curve.last_step:
        console.print(verdict(curve), highlight=False)


def _cell(winner: Winner) -> str:
    half = (winner.speedup.high - winner.speedup.low) / 2
    gaps = "".join("" if gap is None else f" {gap.value:4.0%}" for gap in (winner.gap_ceiling, winner.gap_oracle))
    return f"{winner.speedup.value:.3f}x \u00b1{half:.3f}{gaps}"


TELLING = 0.01  # a change of AUROC that shows in throughput


def verdict(curve: Curve) -> str:
    """Return what the last step of a curve of several points says of more prompts."""
    before, after = curve.points[-2:]
    step = curve.last_step
    text = f"From {before.num_prompts:,} to {after.num_prompts:,} train prompts AUROC changes by {step.value:+.4f} "
    text += f"[{step.low:+.4f}, {step.high:+.4f}]"
    ratio = preferred(list(after.winners))
    gaps = [point.winners[ratio].gap_ceiling for point in (before, after)]
    if None not in gaps:
        text += f", the share of the gap at ratio {ratio} from {gaps[0].value:.1%} to {gaps[1].value:.1%}"
    if step.low > 0:
        return f"{text}. It rises still: more prompts (data.num_train=) or responses (generation.responses_per_prompt=) may help."
    if step.high > TELLING:
        return f"{text}. So many test prompts do not tell whether more train prompts would help; record more with num_prompts=."
    return f"{text}. More prompts are not what heads lack here."


def write_curves(curves: Sequence[Curve], context: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write learning_curve.html, .json and .csv; return their paths."""
    written = [folder / f"{NAME}.{suffix}" for suffix in ("html", "json", "csv")]
    figures = [figure_of(curve) for curve in curves]
    page = "".join(figure.to_html(full_html=False, include_plotlyjs=number == 0) for number, figure in enumerate(figures))
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{NAME.replace("_", " ")}</title>'
    write_whole(written[0], lambda path: path.write_text(head + page, encoding="utf-8"))
    write_json(written[1], {"context": dict(context), "curves": [asdict(curve) for curve in curves]})
    rows = [{"data_set": curve.name} | asdict(point) for curve in curves for point in curve.points]
    write_whole(written[2], lambda path: write_rows(rows, path))
    return written


def figure_of(curve: Curve) -> go.Figure:
    """Return three panels over the number of train prompts: AUROC, speed-up and share of the gap, a line per ratio."""
    figure = make_subplots(1, len(PANELS), subplot_titles=PANELS)
    counts = [point.num_prompts for point in curve.points]
    aurocs = [point.auroc for point in curve.points]
    _line(figure, 1, counts, aurocs, COLORS[-1], SYMBOLS[-1], "AUROC", [f"{one.value:.4f}" for one in aurocs])
    for number, ratio in enumerate(curve.points[0].winners):
        look = COLORS[number % len(COLORS)], SYMBOLS[number % len(SYMBOLS)], f"at ratio {ratio}"
        rows = [point.winners[ratio] for point in curve.points]
        speeds = [row.speedup for row in rows]
        _line(
            figure, 2, counts, speeds, *look, [f"{row.name}<br>{times(row.speedup)} {times_limits(row.speedup)}" for row in rows]
        )
        gaps = [row.gap_ceiling for row in rows]
        if None not in gaps:
            _line(figure, 3, counts, gaps, *look, [f"{percent(gap)} {percent_limits(gap)}" for gap in gaps])
    figure.update_xaxes(type="log", tickvals=counts, ticktext=[f"{count:,}" for count in counts], title="train prompts")
    figure.update_yaxes(tickformat=".0%", col=3)
    title = f"{curve.name}: heads by the number of their train prompts, {curve.points[0].num_steps:,} steps each"
    figure.update_layout(title=title, height=460, hovermode="closest", template="plotly_white")
    return figure


def _line(
    figure: go.Figure,
    panel: int,
    counts: Sequence[int],
    found: Sequence[Interval],
    color: str,
    symbol: str,
    name: str,
    texts: Sequence[str],
) -> None:
    """Add a line with its intervals to a panel; the legend names it once."""
    trace = go.Scatter(
        x=counts,
        y=[one.value for one in found],
        error_y=error_bars(found),
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
