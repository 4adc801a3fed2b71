"""`specheads papers theory`: what the theory says, computed, next to simulations."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specheads.errors import UserError
from specheads.papers.claims import ReportSection
from specheads.papers.theory import rejections, rounds, stopping
from specheads.storage.files import write_json

NUM_TEXTS = 20_000  # each has 50 tokens: a million
NUM_DRAFTS = 20_000
NUM_PROGRAMMES = 5  # models of each size whose linear programmes are solved


def theory(out: str = "outputs/theory", seed: str = "0") -> str:
    """Compute every section, print it and write `theory.json`; return how many claims held, and where the file is.

    Each section has the same seed, so that a change to one leaves the others as they are. Raises UserError for a seed that is no
    integer.
    """
    if not seed.removeprefix("-").isdigit():
        raise UserError(f"seed={seed} must be an integer.")

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(int(seed))

    sections = [
        rejections.simulation(generator(), NUM_TEXTS),
        rejections.batch_improvement(),
        rejections.unbiased(generator()),
        rejections.lower_bound(generator()),
        rejections.pareto_front(generator()),
        rounds.worked_example(),
        rounds.verification_rules(generator(), num_programmes=NUM_PROGRAMMES),
        rounds.joint_choice(generator()),
        stopping.thresholds(generator(), NUM_DRAFTS),
        stopping.greedy_oracle(),
    ]
    console, path = Console(), Path(out) / "theory.json"
    for section in sections:
        _print_section(section, console)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"command": f"specheads papers theory seed={seed}", "sections": [asdict(section) for section in sections]})
    counts = Counter(claim.outcome for section in sections for claim in section.claims)
    return f"claims: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}\n{path}"


def _print_section(section: ReportSection, console: Console) -> None:
    table = Table(
        title=section.title, caption=section.source, title_justify="left", caption_justify="left", box=box.SIMPLE, pad_edge=False
    )
    for number, column in enumerate(section.columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in section.rows:
        texts = (each if isinstance(each, str) else f"{each:,}" if isinstance(each, int) else f"{each:.4f}" for each in row)
        table.add_row(*map(escape, texts))
    console.print(table)
    lines = [
        f"[bold]{claim.outcome}[/bold]: {escape(f'{claim.says} Here: {claim.ours}. {claim.why}')}" for claim in section.claims
    ]
    for line in filter(None, [*lines, escape(section.note)]):
        console.print(line, highlight=False)
    console.print()
