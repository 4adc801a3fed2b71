"""An evaluation as tables on the console, `report.json`, `report.csv`, plots, and `report.html`."""

import csv
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specheads.decoding.records import DecodeStats
from specheads.evaluation.candidate import CEILING, FIXED, ORACLE
from specheads.evaluation.findings import costs_text, fit_text, ratio_name
from specheads.evaluation.intervals import Interval, Sums, interval, predicted_speed, resample_counts, sums
from specheads.evaluation.page import write_page
from specheads.evaluation.results import MEASURED, DataSet, LiveRow, Report, Winner
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.sweep import Measured
from specheads.files import write_json, write_whole

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


def print_report(report: Report, console: Console | None = None) -> None:
    """Print what was found by replay and live, and the findings."""
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    for doubt in report.doubts:
        console.print(f"[bold]{escape(doubt)}[/bold]", highlight=False)
    console.print(f"Costs: {costs_text(report)}", highlight=False)
    for data in report.data_sets:
        _print_winners(data, console, bool(report.doubts))
    if report.live:
        _print_live(report, console)
    if report.drafts:
        _print_drafts(report, console)
    for note in report.notes:
        console.print(note, highlight=False)


def _print_winners(data: DataSet, console: Console, doubtful: bool) -> None:
    ratios = list(dict.fromkeys(winner.ratio for winner in data.winners))
    tuned = "the prompts that rules were tuned on" if data.role == "dev" else "rules tuned on dev prompts"
    table = Table(
        title=f"{data.name}: {data.num_prompts} prompts replayed, {tuned}; speed-up, share of the gap to the ceiling, and for a head the "
        "cost at which it would break even, as a share of a draft step"
    )
    table.add_column("rule", no_wrap=True)
    for ratio in ratios:
        style = "dim" if doubtful and ratio == MEASURED else None
        table.add_column(ratio if ratio == MEASURED else f"at {ratio}", justify="right", no_wrap=True, style=style)
    cells: dict[str, dict[str, str]] = {}
    for winner in data.winners:
        cells.setdefault(winner.family, {})[winner.ratio] = _cell(winner)
    for family, row in cells.items():
        table.add_row(family.replace("_", " "), *(row.get(ratio, "-") for ratio in ratios))
    console.print(table)


def _print_drafts(report: Report, console: Console) -> None:
    ratios = list(dict.fromkeys(ratio for row in report.drafts for ratio in row.speedup))
    table = Table(title="drafts and what stops them: speed-up and block efficiency, each at the draft's own cost ratio")
    for column in ("draft", "with"):
        table.add_column(column)
    for ratio in ratios:
        table.add_column(ratio if ratio == MEASURED else f"at {ratio}", justify="right", no_wrap=True)
    for row in report.drafts:
        cells = [f"{row.speedup[r].value:.3f}x {row.block_efficiency[r]:.2f}" if r in row.speedup else "-" for r in ratios]
        table.add_row(row.draft, row.kind, *cells)
    console.print(table)


def _cell(winner: Winner) -> str:
    half = (winner.speedup.high - winner.speedup.low) / 2
    gap = "" if winner.gap_ceiling is None else f" {winner.gap_ceiling.value:4.0%}"
    even = "" if winner.break_even is None else f" (even at {winner.break_even.value:.0%})"
    return f"{winner.speedup.value:.3f}x \u00b1{half:.3f}{gap}{even}"


def _print_live(report: Report, console: Console) -> None:
    name = report.context["model"] + ("" if report.context.get("lossless", True) else f", {report.context['verification']}")
    table = Table(title=f"{name}: {report.context.get('num_live_prompts')} prompts decoded, 95 % intervals over prompts")
    columns = (
        "setting",
        "tok/s",
        "predicted",
        "replayed",
        "speed-up",
        "discard rate",
        "verif. rate",
        "block eff.",
        "accept.",
        "p50/p90/p99 ms",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "setting" else "right", no_wrap=True)
    for row in report.live:
        rates = [f"{i.value:.3f} \u00b1{(i.high - i.low) / 2:.3f}" for i in (row.discard_rate, row.verification_rate)]
        accepted = "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.2f}"
        latency = "/".join(f"{row.milliseconds[p]:.1f}" for p in ("p50", "p90", "p99"))
        guesses = [_difference(guess, row) for guess in (row.predicted_tokens_per_second, row.replayed_tokens_per_second)]
        speeds = [f"{row.tokens_per_second.value:.0f}", *guesses, f"{row.speedup.value:.2f}x"]
        table.add_row(row.name, *speeds, *rates, f"{row.block_efficiency:.2f}", accepted, latency)
    console.print(table)
    console.print(fit_text(report), highlight=False)
    for ratio, gain in report.gains.items():
        if gain is not None:
            console.print(f"decoded, head over best fixed K at {ratio_name(ratio)}: {_percent(gain)}")
    for row in report.live:
        if row.efficiency_gain:
            console.print(
                f"{row.name}: block efficiency {_percent(row.efficiency_gain)} over {report.context.get('verification')}"
            )


def _difference(guess: float | None, row: LiveRow) -> str:
    return "-" if guess is None else f"{guess / row.tokens_per_second.value - 1:+.1%}"


def _percent(gain: Interval) -> str:
    return f"{gain.value - 1:+.1%} [{gain.low - 1:+.1%}, {gain.high - 1:+.1%}]"


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
    axes.set(xlabel="discard rate (drafted tokens thrown away per token)", ylabel="verification rate (target forwards per token)")
    axes.set_title(f"{report.context['model']}, {data.name} prompts: lower left is better")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plot_speed(report: Report, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    names, speeds = [row.name for row in report.live], [row.tokens_per_second for row in report.live]
    errors = np.array([[abs(i.value - i.low), abs(i.high - i.value)] for i in speeds]).T
    axes.bar(names, [i.value for i in speeds], yerr=errors, color="tab:blue", capsize=2, error_kw={"lw": 0.8})
    for attribute, marker, label in (("predicted", "k_", "from its counts"), ("replayed", "r_", "from replay")):
        values = [(row.name, getattr(row, f"{attribute}_tokens_per_second")) for row in report.live]
        known = [pair for pair in values if pair[1] is not None]
        if known:
            axes.plot(*zip(*known, strict=True), marker, ms=12, label=f"predicted {label}")
    axes.axhline(speeds[0].value, color="0.5", lw=0.8, ls="--")
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{report.context['model']}: measured speed")
    axes.tick_params(axis="x", labelrotation=60)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
