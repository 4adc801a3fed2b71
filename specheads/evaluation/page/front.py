"""The front of total throughput against the speed of each user: figures by load, and the table of all loads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

import plotly.graph_objects as go

from specheads.evaluation.plot_styles import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, SYMBOLS
from specheads.evaluation.table import Cell, Row, Table

ALL = "all"  # the key of the figure of all loads
COLORS = (BLUE, ORANGE, GREEN, RED, SKY, PURPLE)

T = TypeVar("T")


@dataclass(frozen=True)
class FrontPoint:
    """One setting or policy at one load, in tokens per second."""

    name: str
    user: float  # of one request
    total: float  # of all requests together
    lossless: bool = True


Loads = Mapping[str, Sequence[FrontPoint]]  # by the name of the load


def not_beaten(rows: Iterable[T], costs: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the rows that no other row beats in both costs, by the first of them."""
    front: list[T] = []
    for row in sorted(rows, key=costs):
        if not front or costs(row)[1] < costs(front[-1])[1]:
            front.append(row)
    return front


def front_figures(loads: Loads) -> dict[str, go.Figure]:
    """Return a figure for all loads, and for each by its number; a policy looks the same in all of them."""
    names = list(dict.fromkeys(point.name for points in loads.values() for point in points))
    everywhere = _figure()
    for number, name in enumerate(names):
        shown = [(load, point) for load, points in loads.items() for point in points if point.name == name]
        everywhere.add_scatter(mode="lines+markers", **_trace(number, name, shown))
    figures = {ALL: everywhere}
    for key, (load, points) in enumerate(loads.items()):
        figure = _figure()
        front = not_beaten(points, lambda point: (-point.user, -point.total))
        line = {"color": GREY, "width": 1}
        x, y = [point.user for point in front], [point.total for point in front]
        figure.add_scatter(x=x, y=y, mode="lines", line=line, name="Pareto front", uid="front", hoverinfo="skip")
        for point in points:
            figure.add_scatter(mode="markers", **_trace(names.index(point.name), point.name, [(load, point)]))
        figures[str(key)] = figure
    return figures


def _trace(number: int, name: str, shown: Sequence[tuple[str, FrontPoint]]) -> dict[str, object]:
    color, symbol = COLORS[number % len(COLORS)], SYMBOLS[number // len(COLORS) % len(SYMBOLS)]
    dash = "solid" if all(point.lossless for _, point in shown) else "dash"
    return {
        "x": [point.user for _, point in shown],
        "y": [point.total for _, point in shown],
        "marker": {"color": color, "symbol": symbol, "size": 9},
        "line": {"color": color, "width": 1.5, "dash": dash},
        "name": escape(name),
        "uid": f"setting{number}",
        "hovertext": [f"<b>{escape(name)}</b>, {escape(load)}<br>{_speeds(point)}" for load, point in shown],
        "hoverinfo": "text",
    }


def _speeds(point: FrontPoint) -> str:
    return f"{point.total:,.0f} tokens per second in all<br>{point.user:,.1f} per user"


def _figure() -> go.Figure:
    titles = {"xaxis": "tokens per second and user", "yaxis": "tokens per second of all users"}
    axes = {
        axis: {"title": {"text": text, "font": {"size": 13}}, "automargin": True, "zeroline": False}
        for axis, text in titles.items()
    }
    margin = {"l": 10, "r": 10, "t": 40, "b": 10}
    template = go.layout.Template()
    return go.Figure(layout={"template": template, "height": 440, "hovermode": "closest", "margin": margin, **axes})


def front_table(loads: Loads, caption: str) -> Table:
    """Return the table of all loads: throughput, and in brackets that of a user."""
    names = list(dict.fromkeys(point.name for points in loads.values() for point in points))
    by_load = [{point.name: point for point in points} for points in loads.values()]
    rows = [Row([Cell(name, name), *(_cell(points.get(name)) for points in by_load)]) for name in names]
    return Table(caption, ("", *loads), rows)


def _cell(point: FrontPoint | None) -> Cell:
    return Cell(None) if point is None else Cell(f"{point.total:,.0f}", point.total, f"({point.user:,.1f})")
