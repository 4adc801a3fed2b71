"""The text that specheads train prints after it has trained heads."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from specheads.training.heads.head_training import TrainedHeads

METRICS = {"auroc": "AUROC", "kl": "KL", "brier": "Brier", "ece": "ECE"}


def print_heads(trained: "TrainedHeads") -> None:
    """Print how the heads compare with rules without a head, how well they are calibrated in rounds, and their folder."""
    console = Console(highlight=False)
    table = _table("on held-out prompts", *METRICS.values())
    for name, metrics in trained.test.items():
        table.add_row(name, *(f"{metrics[key]:.3f}" if key in metrics else "-" for key in METRICS))
    console.print("", table)
    if trained.calibration_errors:
        table = _table("in rounds on dev prompts", "ECE", "calibrated")
        for name, errors in trained.calibration_errors.items():
            table.add_row(name, f"{errors['raw']:.3f}", f"{errors['cross_fitted']:.3f}")
            if "overlap_raw" in errors:
                shown = (f"{errors[f'overlap_{key}']:.3f}" for key in ("raw", "cross_fitted"))
                table.add_row(f"{name}, before a token is sampled", *shown)
        console.print("", table, "calibrated: fitted on one half of the prompts, measured on the other")
    print(f"\n{'head' if trained.num_heads == 1 else 'heads'}: {trained.folder}")


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(title)
    for column in columns:
        table.add_column(column, justify="right")
    return table
