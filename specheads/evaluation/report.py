"""An evaluation as `report.json`, `report.csv`, plots, and `report.html`."""

import csv
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from specheads.decoding.records import DecodeStats
from specheads.evaluation.candidate import CEILING, FIXED, ORACLE
from specheads.evaluation.intervals import Sums, interval, predicted_speed, resample_counts, sums
from specheads.evaluation.page import write_page
from specheads.evaluation.results import MEASURED, LiveRow, Report
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.sweep import Measured
from specheads.storage.files import write_json, write_whole

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SHOWN = (FIXED, "head_threshold", CEILING, ORACLE)  # families of the plot that the README has
COLORS = dict(zip(SHOWN, ("tab:blue", "tab:orange", "tab:green", "0.4"), strict=True))
LABELS = {FIXED: "fixed K", "head_threshold": "head, threshold", CEILING: "informed ceiling", ORACLE: "oracle"}


def live_rows(
    measured: Sequence[Measured],
    cost_table: CostTable,
    lossless: bool,
    replayed: Mapping[str, float] | None = None,
    groups: Sequence[Hashable] | None = None,
) -> list[LiveRow]:
    """Return a row for every setting that was decoded, the first of which is the target alone.

    Args:
        cost_table: what rules pay at every ratio, the measured one among them.
        lossless: whether the sweep's own verification rule is.
        replayed: by setting, tokens per second from replayed counts of the same prompts.
        groups: that of each prompt; None: each is its own.
    """
    counts = resample_counts(groups or len(measured[0].stats))
    alone = sums(measured[0].stats, counts).tokens_per_second
    fixed = {m.setting.value: sums(m.stats, counts) for m in measured if m.setting.family == FIXED}
    return [_live_row(m, counts, alone, cost_table, fixed, lossless, replayed or {}) for m in measured]


def _live_row(
    measured: Measured,
    counts: np.ndarray,
    alone: np.ndarray,
    cost_table: CostTable,
    fixed: Mapping[float, Sums],
    lossless: bool,
    replayed: Mapping[str, float],
) -> LiveRow:
    setting, other = measured.setting, measured.setting.verification
    found, total = sums(measured.stats, counts), DecodeStats.total(measured.stats)
    drafting = setting.rule is not None
    percentiles = np.percentile(measured.token_seconds, [50, 90, 99]) * 1e3
    predicted = {}
    if drafting:
        own = cost_table.for_prompts(setting, len(measured.stats))
        predicted = {ratio: predicted_speed(measured, cost_table.of(setting, ratio), counts) for ratio in cost_table.costs}
    return LiveRow(
        name=setting.name,
        family=setting.family,
        value=setting.value,
        tokens_per_second=interval(found.tokens_per_second),
        speedup=interval(found.tokens_per_second / alone),
        discard_rate=interval(found.discard_rate),
        verification_rate=interval(found.verification_rate),
        block_efficiency=total.block_efficiency,
        acceptance_rate=total.acceptance_rate,
        milliseconds=dict(zip(("p50", "p90", "p99"), percentiles.tolist(), strict=True)),
        predicted_tokens_per_second=float(predicted_speed(measured, own, counts)[0]) if drafting else None,
        replayed_tokens_per_second=replayed.get(setting.name),
        predicted_speedup={
            ratio: interval(speed / (cost_table.alone if ratio == MEASURED else 1.0)) for ratio, speed in predicted.items()
        },
        lossless=setting.search is None and (not drafting or (lossless if other is None else other.lossless)),
        efficiency_gain=interval(fixed[setting.value].verification_rate / found.verification_rate) if other else None,
    )


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.html, report.json, report.csv and plots; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / name for name in ("report.html", "report.json", "report.csv")]
    write_page(report, written[0])
    write_json(written[1], asdict(report))
    write_whole(written[2], lambda path: _write_csv(report, path))
    if report.data_sets:
        written.append(folder / "pareto.png")
        _plot_pareto(report, written[-1])
    if report.live:
        written.append(folder / "speed.png")
        _plot_speed(report, written[-1])
    return written


def _write_csv(report: Report, path: Path) -> None:
    """Write a row for every rule of every data set and every setting that was decoded."""
    replayed = [{"data_set": data.name, "how": "replayed"} | asdict(row) for data in report.data_sets for row in data.rules]
    write_rows([*replayed, *({"how": "decoded"} | asdict(row) for row in report.live)], path)


def write_rows(content: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a CSV file with a column for every key, those of mappings within as `outer.inner`."""
    rows = [_flat(row) for row in content]
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


def _plot_pareto(report: Report, path: Path) -> None:
    """Plot the main families of the first test set: the picture for a README."""
    data = next((one for one in report.data_sets if one.role == "test"), report.data_sets[0])
    figure, axes = plt.subplots(figsize=(6.4, 4.8), layout="constrained")
    for family in SHOWN:
        rows = sorted((row for row in data.rules if row.family == family), key=lambda row: row.discard_rate.value)
        if not rows:
            continue
        pairs = [[getattr(row, name) for row in rows] for name in ("discard_rate", "verification_rate")]
        x, y = ([one.value for one in column] for column in pairs)
        errors = [np.array([[abs(i.value - i.low), abs(i.high - i.value)] for i in column]).T for column in pairs]
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
        for row, *point in zip(rows, x, y, strict=True):
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


def _plot_speed(report: Report, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    names, speeds = [row.name for row in report.live], [row.tokens_per_second for row in report.live]
    errors = np.array([[abs(i.value - i.low), abs(i.high - i.value)] for i in speeds]).T
    axes.bar(
        names,
        [i.value for i in speeds],
        yerr=errors,
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
