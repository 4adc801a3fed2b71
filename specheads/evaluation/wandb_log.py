"""The report on Weights & Biases, where logging is on (`logger=default`)."""

from collections.abc import Sequence
from typing import Any

import wandb
from lightning.pytorch.loggers import Logger, WandbLogger

from specheads.evaluation import figures
from specheads.evaluation.results import Report


def log_report(report: Report, loggers: Sequence[Logger]) -> None:
    """Log tables and plots to every W&B logger; others have no place for them."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.log_hyperparams({key: value for key, value in report.context.items() if key != "config"})
            logger.experiment.log(contents(report))


def contents(report: Report) -> dict[str, Any]:
    """Return what is logged: a table of winners for each data set, one of live measurements, and the figures."""
    columns = ["rule", "chosen", "ratio", "speed-up", "low", "high", "gain", "gap to ceiling", "gap to oracle"]
    found: dict[str, Any] = {}
    for data in report.data_sets:
        rows = [
            [w.family, w.name, w.ratio, w.speedup.value, w.speedup.low, w.speedup.high, w.gain.value]
            + [gap and gap.value for gap in (w.gap_ceiling, w.gap_oracle)]
            for w in data.winners
        ]
        found[f"replay/{data.name}"] = wandb.Table(columns=columns, data=rows)
    if report.live:
        live = [
            [r.name, r.tokens_per_second.value, r.predicted_tokens_per_second, r.replayed_tokens_per_second] for r in report.live
        ]
        found["live"] = wandb.Table(columns=["setting", "tokens/s", "predicted", "replayed"], data=live)
    drawn = {f"{name}/{key}": figure for name, some in figures.figures_of(report).items() for key, figure in some.items()}
    return found | {name: wandb.Plotly(figure) for name, figure in drawn.items()}
