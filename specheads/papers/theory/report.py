"""`specheads papers theory`: what the theory says, computed, next to simulations; figures and `theory.json`."""

import itertools
from dataclasses import asdict
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specheads.errors import UserError
from specheads.papers.claims import Figure, Section
from specheads.papers.theory import rejection_sections, rounds, stopping_sections
from specheads.papers.theory.stopping import Drafts
from specheads.replay.recording import GROUND_TRUTH, load_recording
from specheads.storage.files import write_json, write_whole
from specheads.storage.shards import MANIFEST

NUM_TEXTS = 20_000  # of 50 tokens: a million
NUM_DRAFTS = 20_000


def theory(out: str = "outputs/theory", seed: str = "0", data: str | None = None) -> str:
    """Compute every section, print it, write figures and `theory.json`; return where they are.

    Raises:
        UserError: a seed that is no integer; data without recorded drafts.
    """
    if not seed.removeprefix("-").isdigit():
        raise UserError(f"seed={seed} must be an integer.")
    recorded = {Path(data).name: recorded_drafts(Path(data))} if data else {}
    sections = computed(int(seed), recorded)
    console = Console()
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for section in sections:
        _print_section(section, console)
        if section.figure is not None:
            _write_figure(section.figure, section.title, folder / f"{section.key}.png")
    command = " ".join(["specheads papers theory", f"seed={seed}", *([f"data={data}"] if data else [])])
    write_json(folder / "theory.json", {"command": command, "sections": [asdict(section) for section in sections]})
    claims = [claim for section in sections for claim in section.claims]
    counts = {outcome: sum(claim.outcome == outcome for claim in claims) for outcome in ("held", "held weakly", "did not hold")}
    return "\n".join(
        [
            "claims: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()),
            f"{folder / 'theory.json'} and {sum(section.figure is not None for section in sections)} figures written",
        ]
    )


def computed(seed: int, recorded: dict[str, Drafts]) -> list[Section]:
    """Return all sections, each from the same seed, so that a change to one leaves the others as they are."""

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    return [
        rejection_sections.simulation(generator(), NUM_TEXTS),
        rejection_sections.batch_improvement(),
        rejection_sections.unbiased(generator()),
        rejection_sections.lower_bound(generator()),
        rejection_sections.pareto_front(generator()),
        rounds.worked_example(),
        rounds.verification_rules(generator()),
        rounds.independent_acceptance(),
        rounds.joint_choice(generator()),
        stopping_sections.thresholds(generator(), NUM_DRAFTS, recorded),
        stopping_sections.greedy_oracle(),
    ]


def recorded_drafts(folder: Path) -> Drafts:
    """Return drafts of a recording as long as it can replay: from every K-th position along each response, for each sample.

    A draft follows the response while its tokens are accepted, and then the branch; those that end earlier are left out.

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
    return Drafts(torch.stack(drafts))


def _print_section(section: Section, console: Console) -> None:
    """Print a section: its table, and whether each claim held."""
    table = Table(
        title=section.title, caption=section.source, title_justify="left", caption_justify="left", box=box.SIMPLE, pad_edge=False
    )
    for number, column in enumerate(section.columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in section.rows:
        table.add_row(*(escape(_text(value)) for value in row))
    console.print(table)
    for claim in section.claims:
        console.print(f"[bold]{claim.outcome}[/bold]: {escape(claim.says)} Here: {escape(claim.ours)}.", highlight=False)
        if claim.why:
            console.print(escape(claim.why), highlight=False)
    if section.note:
        console.print(escape(section.note), highlight=False)
    console.print()


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _write_figure(figure: Figure, title: str, path: Path) -> None:
    """Write a figure as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plot, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for line in figure.lines:
        axes.plot(line.x, line.y, label=line.name, marker="o" if len(line.x) < 12 else None, markersize=3)
    axes.set(xlabel=figure.x, ylabel=figure.y)
    axes.set_title(title, fontsize=9, wrap=True)
    axes.grid(alpha=0.3)
    axes.legend()
    write_whole(path, lambda temporary: plot.savefig(temporary, dpi=150, format="png"))
    pyplot.close(plot)
