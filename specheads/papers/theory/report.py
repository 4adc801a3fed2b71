"""`specheads papers theory`: what the theory says, computed, next to simulations."""

import itertools
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from specheads.errors import UserError
from specheads.papers.claims import ReportSection
from specheads.papers.theory import rejections, rounds, stopping
from specheads.replay.recording import GROUND_TRUTH, load_recording
from specheads.storage.files import write_json
from specheads.storage.shards import MANIFEST

NUM_TEXTS = 20_000  # each has 50 tokens: a million
NUM_DRAFTS = 20_000


def theory(out: str = "outputs/theory", seed: str = "0", data: str | None = None) -> str:
    """Compute every section, print it and write `theory.json`; return how many claims held, and where the file is.

    Each section has the same seed, so that a change to one leaves the others as they are.

    Raises:
        UserError: a seed that is no integer; data without recorded drafts.
    """
    if not seed.removeprefix("-").isdigit():
        raise UserError(f"seed={seed} must be an integer.")
    recorded = {Path(data).name: _recorded_drafts(Path(data))} if data else {}

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(int(seed))

    sections = [
        rejections.simulation(generator(), NUM_TEXTS),
        rejections.batch_improvement(),
        rejections.unbiased(generator()),
        rejections.lower_bound(generator()),
        rejections.pareto_front(generator()),
        rounds.worked_example(),
        rounds.verification_rules(generator()),
        rounds.joint_choice(generator()),
        stopping.thresholds(generator(), NUM_DRAFTS, recorded),
        stopping.greedy_oracle(),
    ]
    console, path = Console(), Path(out) / "theory.json"
    for section in sections:
        _print_section(section, console)
    path.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["specheads papers theory", f"seed={seed}", *([f"data={data}"] if data else [])])
    write_json(path, {"command": command, "sections": [asdict(section) for section in sections]})
    counts = Counter(claim.outcome for section in sections for claim in section.claims)
    return f"claims: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}\n{path}"


def _recorded_drafts(folder: Path) -> Tensor:
    """Return drafts of a recording as long as it can replay: from every K-th position along each response, for each sample.

    A draft (K,) has its tokens' acceptance probabilities. It follows the response while its tokens are accepted, and then the
    branch; those that end earlier are left out.

    Raises:
        UserError: no recording, or one without the target's acceptance probabilities.
    """
    if not (folder / "predictions" / GROUND_TRUTH / MANIFEST).is_file():
        raise UserError(
            f"data={folder} holds no recording with the target's acceptance probabilities; specheads evaluate makes one, and its "
            "log names the folder, in recordings/ of paths.data."
        )
    recording = load_recording(folder, [GROUND_TRUTH])
    probability, most = recording.features[GROUND_TRUTH].double(), recording.max_tokens
    drafts = []
    for first, length in zip(recording.first.tolist(), recording.lengths.tolist(), strict=True):
        for sample, start in itertools.product(range(recording.num_samples), range(first, first + length - most + 1, most)):
            count = int(recording.accepted[sample, start : start + most].long().cumprod(dim=0).sum())
            rejected = start + count  # its branch has the rest of the draft
            branch = int(recording.branch_first[sample, rejected]) if count < most else 0
            if count == most or recording.branch_length[sample, rejected] >= most - count:
                drafts.append(torch.cat([probability[start:rejected], probability[branch : branch + most - count]]))
    if not drafts:
        raise UserError(f"data={folder} holds no response of {most} tokens, the longest draft; record longer responses.")
    return torch.stack(drafts)


def _print_section(section: ReportSection, console: Console) -> None:
    """Print a section: its table, and whether each claim held."""
    table = Table(
        title=section.title, caption=section.source, title_justify="left", caption_justify="left", box=box.SIMPLE, pad_edge=False
    )
    for number, column in enumerate(section.columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in section.rows:
        table.add_row(*(escape(_text(value)) for value in row))
    console.print(table)
    lines = [
        f"[bold]{claim.outcome}[/bold]: {escape(f'{claim.says} Here: {claim.ours}. {claim.why}')}" for claim in section.claims
    ]
    for line in filter(None, [*lines, escape(section.note)]):
        console.print(line, highlight=False)
    console.print()


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
