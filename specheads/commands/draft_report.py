"""The text that specheads train prints after a distillation."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from specheads.training.distill.draft_quality import MEANINGS

if TYPE_CHECKING:
    from specheads.training.distill.distillation import DistilledDraft


def print_draft(distilled: "DistilledDraft") -> None:
    """Print the draft's quality before and after the distillation, and its folder."""
    table = Table("on test prompts", box=box.SIMPLE_HEAD)
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for name, after in distilled.after.items():
        before = distilled.before[name]
        table.add_row(name, f"{before:.4f}", f"{after:.4f}", f"{after / before - 1:+.1%}" if before else "-")
    console = Console(highlight=False)
    console.print("", table)
    for name, meaning in MEANINGS.items():
        console.print(f"{name}: {meaning}", soft_wrap=True)
    print(f"draft: {distilled.folder}")
