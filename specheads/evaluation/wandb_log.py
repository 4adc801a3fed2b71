"""The report on Weights & Biases, where logging is on (`logger=wandb`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import wandb
from lightning.pytorch.loggers import Logger, WandbLogger

from specheads.evaluation.conclusions import is_trusted
from specheads.evaluation.intervals import Interval
from specheads.evaluation.page import figures
from specheads.evaluation.quality_columns import Column, quality_columns
from specheads.evaluation.report import MEASURED, Report

COSTS = ("head's cost", "break-even", "cost of one more verified token")
WINNERS = ("rule", "chosen", "ratio", "speed-up", "low", "high", "gain", "gap to ceiling", "gap to oracle", *COSTS)
BANK = ("head", "ratio", "speed-up", "low", "high", "threshold", "AUROC", *COSTS)
DRAFTS = ("draft", "with", "rule", "ratio", "speed-up", "low", "high", "block efficiency", COSTS[-1])
LIVE = ("setting", "tokens/s", "predicted", "replayed")
BATCHES = (
    *("at once", "requests", "setting", "tokens/s", "over target alone", "tokens/s of a request", "speed-up", "low", "high"),
    *("ms per token p50", "ms per token p99", "ms to the first p50", "ms to the first p99", "tokens per round", "lossless"),
)


def log_report(report: Report, loggers: Sequence[Logger]) -> None:
    """Log tables and plots to every W&B logger; others have no place for them."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            context = {key: value for key, value in report.context.items() if key != "config"}
            logger.log_hyperparams(context | {"doubts": list(report.doubts)})
            logger.experiment.log(contents(report))


def contents(report: Report) -> dict[str, Any]:
    """Return the logged tables and the figures.

    Tables are of winners for each data set, heads, drafts, live measurements, quality, candidates and batches.

    Where measured figures are not to be trusted, the reasons are logged in their place.
    """
    tables = {name: wandb.Table(columns=list(columns), data=rows) for name, (columns, rows) in _tables(report).items() if rows}
    drawn = {
        f"{name}/{key}": figure
        for name, some in figures.figures_of(report).items()
        for key, figure in some.items()
        if figure.layout.meta != figures.DOUBTFUL
    }
    return tables | {name: wandb.Plotly(figure) for name, figure in drawn.items()}


def _tables(report: Report) -> dict[str, tuple[Sequence[str], list[list[Any]]]]:
    """Return columns and rows of every table by name; those without rows are not logged."""
    tables: dict[str, tuple[Sequence[str], list[list[Any]]]] = {}
    for data in report.data_sets:
        rows = [
            [w.family, w.name, w.ratio, *_limits(w.speedup), w.gain.value, _value(w.gap_ceiling), _value(w.gap_oracle)]
            + [w.head_share, _value(w.break_even), _verified(report, w.ratio)]
            for w in data.winners
            if is_trusted(report, w.ratio)
        ]
        tables[f"replay/{data.name}"] = WINNERS, rows
    heads = [
        [row.head, ratio, *_limits(speedup), row.threshold.get(ratio), row.auroc, row.head_share.get(ratio)]
        + [_value(row.break_even.get(ratio)), _verified(report, ratio)]
        for row in report.bank
        for ratio, speedup in row.speedup.items()
        if is_trusted(report, ratio)
    ]
    drafts = [
        [row.draft, row.kind, row.rules[ratio], ratio, *_limits(speedup), row.block_efficiency[ratio], _verified(report, ratio)]
        for row in report.drafts
        for ratio, speedup in row.speedup.items()
        if is_trusted(report, ratio)
    ]
    live = [[r.name, r.tokens_per_second.value, r.predicted_tokens_per_second, r.replayed_tokens_per_second] for r in report.live]
    return tables | {
        "heads": (BANK, heads),
        "drafts": (DRAFTS, drafts),
        "live": (LIVE, [] if report.doubts else live),
        "quality": _estimates(report, quality_columns(report)),
        "batches": (BATCHES, [] if report.doubts else _batches(report)),
        "doubts": (["what was measured is not to be trusted"], [[doubt] for doubt in report.doubts]),
    }


def _batches(report: Report) -> list[list[Any]]:
    return [
        [table.concurrency, table.num_requests, row.name, row.tokens_per_second, row.over_alone, row.request_tokens_per_second]
        + [*_limits(row.speedup), *(times[level] for times in (row.token_ms, row.first_token_ms) for level in ("p50", "p99"))]
        + [row.tokens_per_round, row.lossless]
        for table in report.batches
        for row in table.rows
    ]


def _estimates(report: Report, columns: Sequence[Column]) -> tuple[Sequence[str], list[list[Any]]]:
    """Return columns with their limits, and the rows of the settings that have any."""
    names = [f"{column.name}{limit}" for column in columns for limit in ("", ", low", ", high")]
    settings = [(row.name, [column.value(row) for column in columns]) for row in report.live]
    rows = [[name, *(each for value in values for each in _limits_or_none(value))] for name, values in settings if any(values)]
    return ["setting", *names], rows


def _limits_or_none(estimate: Interval | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if estimate is None else _limits(estimate)


def _limits(estimate: Interval) -> tuple[float, float, float]:
    return estimate.value, estimate.low, estimate.high


def _value(estimate: Interval | None) -> float | None:
    return None if estimate is None else estimate.value


def _verified(report: Report, ratio: str) -> float | None:
    """Return the cost of verifying one more token at a ratio, as a share of a forward pass; None if it was measured."""
    given: Mapping[str, float] = report.context.get("costs") or {}
    return None if ratio == MEASURED else given.get("verified_share", 0.0)
