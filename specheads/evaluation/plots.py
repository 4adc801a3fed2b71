"""A report's plots as PNG files."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from specheads.evaluation.candidates import CEILING, FIXED, ORACLE
from specheads.evaluation.intervals import Interval
from specheads.evaluation.report import Report

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SHOWN = (FIXED, "head_threshold", CEILING, ORACLE)  # families of the plot that the README has
COLORS = dict(zip(SHOWN, ("tab:blue", "tab:orange", "tab:green", "0.4"), strict=True))
LABELS = {FIXED: "fixed K", "head_threshold": "head, threshold", CEILING: "informed ceiling", ORACLE: "oracle"}


def plot_pareto(report: Report, path: Path) -> None:
    """Plot both rates of the main families on the first test set: the picture for a README."""
    data = next((data for data in report.data_sets if data.role == "test"), report.data_sets[0])
    figure, axes = plt.subplots(figsize=(6.4, 4.8), layout="constrained")
    for family in SHOWN:
        rows = sorted((row for row in data.rules if row.family == family), key=lambda row: row.discard_rate.value)
        if not rows:
            continue
        pairs = [[getattr(row, name) for row in rows] for name in ("discard_rate", "verification_rate")]
        x, y = ([rate.value for rate in column] for column in pairs)
        errors = [_error_bars(column) for column in pairs]
        axes.errorbar(
            x,
            y,
            xerr=errors[0],
            yerr=errors[1],
            marker="o",
            ms=4,
            lw=1.2,
            elinewidth=0.6,
            color=COLORS[family],
            label=LABELS[family],
        )
        for row, point in zip(rows, zip(x, y, strict=True), strict=True):
            if row.value is not None and family != CEILING:
                axes.annotate(
                    f"{row.value:g}", point, textcoords="offset points", xytext=(5, 4), fontsize=8, color=COLORS[family]
                )
    axes.set(
        xlabel="discard rate (drafted tokens thrown away per token)",
        ylabel="verification rate (forward passes of the target per token)",
    )
    axes.set_title(f"{report.context['model']}, {data.name} prompts: lower left is better")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_speed(report: Report, path: Path) -> None:
    """Plot the measured speed of every setting, next to what costs and replay predict."""
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
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
    plt.close(figure)


def _error_bars(estimates: Sequence[Interval]) -> np.ndarray:
    """Return how far the intervals reach below and above their estimates, (2, n)."""
    return np.array([[abs(estimate.value - estimate.low), abs(estimate.high - estimate.value)] for estimate in estimates]).T
