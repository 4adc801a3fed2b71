"""The text that specheads train prints after it has trained heads."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from specheads.training.heads.head_training import TrainedHeads

METRICS = {"auroc": "AUROC", "kl": "KL", "brier": "Brier", "ece": "ECE"}
MOST_SHOWN = 20  # heads; a bank may have thousands


def print_heads(trained: "TrainedHeads") -> None:
    """Print how the heads compare with rules without a head, how well they are calibrated in rounds, and their folder.

    Of very many heads, those of the lowest KL are shown.
    """
    console = Console(highlight=False)
    shown, others = best_heads(trained), [name for name in trained.test if name not in trained.names]
    table = _table("on held-out prompts", *METRICS.values())
    for name in [*shown, *others]:
        metrics = trained.test[name]
        table.add_row(name, *(f"{metrics[key]:.3f}" if key in metrics else "-" for key in METRICS))
    console.print("", table)
    if left_out := trained.num_heads - len(shown):
        console.print(f"the {len(shown)} heads of the lowest KL; {left_out:,} more are in {trained.folder.parent}/test.json")
    if trained.calibration_errors:
        table = _table("in rounds on dev prompts", "ECE", "calibrated")
        for name in shown:
            errors = trained.calibration_errors[name]
            table.add_row(name, f"{errors['raw']:.3f}", f"{errors['cross_fitted']:.3f}")
            if "overlap_raw" in errors:
                values = (f"{errors[f'overlap_{key}']:.3f}" for key in ("raw", "cross_fitted"))
                table.add_row(f"{name}, before a token is sampled", *values)
        console.print("", table, "calibrated: fitted on one half of the prompts, measured on the other")
    print(f"\n{'head' if trained.num_heads == 1 else 'heads'}: {trained.folder}")


def best_heads(trained: "TrainedHeads") -> list[str]:
    """Return the names of the heads in their order; of more than MOST_SHOWN, those of the lowest KL, the lowest first."""
    if trained.num_heads <= MOST_SHOWN:
        return list(trained.names)
    return sorted(trained.names, key=lambda name: trained.test[name]["kl"])[:MOST_SHOWN]


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(title)
    for column in columns:
        table.add_column(column, justify="right")
    return table
