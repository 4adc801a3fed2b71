"""A sweep as a table, `report.json`, `report.csv` and two plots."""

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

from specheads.decoding.records import DecodeStats
from specheads.evaluation.intervals import Interval, Sums, gain_over_fixed, interval, resample_counts, sums
from specheads.evaluation.sweep import Measured
from specheads.replay.cost import Costs, fit_costs

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"target": "0.5", "fixed": "tab:blue", "head": "tab:orange", "own": "tab:purple"}
LABELS = {"fixed": "fixed K", "head": "head, threshold", "own": "own stopping rule"}
OTHERS = ("tab:green", "tab:red", "tab:brown", "tab:pink")  # fixed lengths under other verification rules


@dataclass(frozen=True)
class Row:
    """One setting's results. Speeds in tokens per second, latencies in milliseconds per token."""

    name: str
    family: str
    value: float
    tokens_per_second: Interval
    speedup: Interval
    discard_rate: Interval
    verification_rate: Interval
    block_efficiency: float
    acceptance_rate: float | None
    milliseconds: dict[str, float]  # p50, p90, p99
    predicted_tokens_per_second: float | None  # by the fitted costs; None for the target alone
    predicted_speedup: dict[str, Interval]  # by the ratio of a target to a draft forward
    lossless: bool  # whether what comes out follows the target's law
    efficiency_gain: Interval | None  # block efficiency over the same length's under the sweep's own verification rule, a ratio


@dataclass(frozen=True)
class Report:
    """A whole sweep. `gains`: the head's predicted throughput over the best fixed length's, by ratio, cross-fitted."""

    context: Mapping[str, Any]
    costs: Costs
    rows: Sequence[Row]
    gains: Mapping[str, Interval | None]


def make_report(measured: Sequence[Measured], context: Mapping[str, Any], ratios: Sequence[float]) -> Report:
    """Compute every figure of a sweep whose first setting is the target alone.

    `ratios`: how many draft forwards a target forward is taken to cost, for predictions beside the measured ratio.
    """
    # A forward of the target alone has no draft to verify, so it says nothing about a round's costs.
    costs = fit_costs([part for m in measured if m.setting.rule is not None for part in m.stats])
    at = {"measured": Costs.at_ratio(costs.ratio), **{f"{r:g}": Costs.at_ratio(r) for r in ratios}}
    counts = resample_counts(len(measured[0].stats))
    alone = sums(measured[0].stats, counts).tokens_per_second
    fixed = {m.setting.value: sums(m.stats, counts) for m in measured if m.setting.family == "fixed"}
    rows = [_row(m, counts, alone, costs, at, fixed, context.get("lossless", True)) for m in measured]
    return Report(context, costs, rows, {name: gain_over_fixed(measured, own) for name, own in at.items()})


def _row(
    measured: Measured,
    counts: np.ndarray,
    alone: np.ndarray,
    costs: Costs,
    ratios: Mapping[str, Costs],
    fixed: Mapping[float, Sums],
    lossless: bool,
) -> Row:
    other = measured.setting.verification
    found, total = sums(measured.stats, counts), DecodeStats.total(measured.stats)
    drafting = measured.setting.rule is not None
    percentiles = np.percentile(measured.token_seconds, [50, 90, 99]) * 1e3
    return Row(
        name=measured.setting.name,
        family=measured.setting.family,
        value=measured.setting.value,
        tokens_per_second=interval(found.tokens_per_second),
        speedup=interval(found.tokens_per_second / alone),
        discard_rate=interval(found.discard_rate),
        verification_rate=interval(found.verification_rate),
        block_efficiency=total.block_efficiency,
        acceptance_rate=total.acceptance_rate,
        milliseconds=dict(zip(("p50", "p90", "p99"), percentiles.tolist(), strict=True)),
        predicted_tokens_per_second=float(found.predicted(costs)[0]) if drafting else None,
        predicted_speedup={name: interval(found.predicted(at)) for name, at in ratios.items()} if drafting else {},
        lossless=not drafting or (lossless if other is None else other.lossless),
        efficiency_gain=interval(fixed[measured.setting.value].verification_rate / found.verification_rate) if other else None,
    )


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json, report.csv, pareto.png and speed.png; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    _write_csv(report, folder / "report.csv")
    _plot_pareto(report, folder / "pareto.png")
    _plot_speed(report, folder / "speed.png")
    return [folder / name for name in ("report.json", "report.csv", "pareto.png", "speed.png")]


def _name(report: Report) -> str:
    """Return the pair's name, and what its text is worth where verification is not lossless."""
    return report.context["model"] + ("" if report.context.get("lossless", True) else f", {report.context['verification']}")


def print_report(report: Report, console: Console | None = None) -> None:
    """Print the table, the fitted costs, and what the head gains."""
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    table = Table(title=f"{_name(report)}: {report.context['num_prompts']} prompts, 95 % intervals over prompts")
    columns = ("setting", "tok/s", "speed-up", "discard rate", "verif. rate", "block eff.", "accept.", "p50/p90/p99 ms")
    ratios = [name for name in report.gains if name != "measured"]
    for name in (*columns, *(f"x at {r}" for r in ratios)):
        table.add_column(name, justify="left" if name == "setting" else "right", no_wrap=True)
    for row in report.rows:
        rates = [f"{i.value:.3f} \u00b1{(i.high - i.low) / 2:.3f}" for i in (row.discard_rate, row.verification_rate)]
        at = [f"{row.predicted_speedup[r].value:.3f}" if row.predicted_speedup else "1" for r in ratios]
        accepted = "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.2f}"
        latency = "/".join(f"{row.milliseconds[p]:.1f}" for p in ("p50", "p90", "p99"))
        speeds = [f"{row.tokens_per_second.value:.0f}", f"{row.speedup.value:.2f}x"]
        table.add_row(row.name, *speeds, *rates, f"{row.block_efficiency:.2f}", accepted, latency, *at)
    console.print(table)
    costs = report.costs
    console.print(
        f"fitted: draft forward {costs.draft_seconds * 1e3:.2f} ms, target forward {costs.target_seconds * 1e3:.2f} ms, "
        f"ratio {costs.ratio:.2f}, R\u00b2 {costs.r_squared:.3f}; 'x at r': predicted speed-up if a target forward cost r draft forwards"
    )
    for name, gain in report.gains.items():
        if gain is not None:
            ratio = f"the measured ratio {costs.ratio:.1f}" if name == "measured" else f"ratio {name}"
            console.print(f"head over best fixed K at {ratio}: {gain.value - 1:+.1%} [{gain.low - 1:+.1%}, {gain.high - 1:+.1%}]")
    for row in report.rows:
        if gain := row.efficiency_gain:
            means = ", ".join(f"{value - 1:+.1%}" for value in (gain.low, gain.high))
            console.print(f"{row.name}: block efficiency {gain.value - 1:+.1%} [{means}] over {report.context['verification']}")
    _warn_if_slower(report, console)


def _warn_if_slower(report: Report, console: Console) -> None:
    best = max(report.rows[1:], key=lambda row: row.speedup.value)
    if best.speedup.value < 1:
        console.print(
            f"speculative decoding makes this pair slower here: the best setting, {best.name}, reaches {best.speedup.value:.2f}x of the "
            f"target alone, because a target forward costs only {report.costs.ratio:.1f} draft forwards on this machine."
        )


def _write_csv(report: Report, path: Path) -> None:
    rows = [_flat(asdict(row)) for row in report.rows]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def _colors(report: Report) -> dict[str, str]:
    """Return a color for each family of rows, in their order."""
    families = list(dict.fromkeys(row.family for row in report.rows))
    others = [family for family in families if family not in COLORS]
    known = COLORS | {family: OTHERS[number % len(OTHERS)] for number, family in enumerate(others)}
    return {family: known[family] for family in families}


def _plot_pareto(report: Report, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 4.8), layout="constrained")
    colors = _colors(report)
    for family in [family for family in colors if family != "target"]:
        rows, label = [row for row in report.rows if row.family == family], LABELS.get(family, f"{family}, fixed K")
        x, y = [np.array([getattr(row, name).value for row in rows]) for name in ("discard_rate", "verification_rate")]
        errors = [
            np.array([[abs(i.value - i.low), abs(i.high - i.value)] for i in (getattr(row, name) for row in rows)]).T
            for name in ("discard_rate", "verification_rate")
        ]
        axes.errorbar(
            x, y, xerr=errors[0], yerr=errors[1], marker="o", ms=4, lw=1.2, elinewidth=0.6, color=colors[family], label=label
        )
        for row, *point in zip(rows, x, y, strict=True):
            axes.annotate(f"{row.value:g}", point, textcoords="offset points", xytext=(5, 4), fontsize=8, color=colors[family])
    axes.set(xlabel="discard rate (drafted tokens thrown away per token)", ylabel="verification rate (target forwards per token)")
    axes.set_title(f"{_name(report)}: lower left is better")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plot_speed(report: Report, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    names = [row.name for row in report.rows]
    speeds = [row.tokens_per_second for row in report.rows]
    errors = np.array([[abs(i.value - i.low), abs(i.high - i.value)] for i in speeds]).T
    axes.bar(
        names,
        [i.value for i in speeds],
        yerr=errors,
        color=[_colors(report)[row.family] for row in report.rows],
        capsize=2,
        error_kw={"lw": 0.8},
    )
    predicted = [(row.name, row.predicted_tokens_per_second) for row in report.rows if row.predicted_tokens_per_second]
    axes.plot(*zip(*predicted, strict=True), "k_", ms=12, label="predicted from the counts")
    axes.axhline(speeds[0].value, color="0.5", lw=0.8, ls="--")
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{_name(report)}: measured speed")
    axes.tick_params(axis="x", labelrotation=60)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
