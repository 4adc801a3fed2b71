"""A learning curve as records and as a table on the console."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from specheads.evaluation.conclusions import preferred
from specheads.evaluation.intervals import Interval
from specheads.evaluation.report import Winner

NOTICEABLE = 0.01  # a change of AUROC that shows in throughput


@dataclass(frozen=True)
class Point:
    """The quality of a head that learned from one share of the train prompts."""

    share: float
    num_prompts: int  # train prompts
    num_responses: int  # to them
    num_epochs: int
    num_steps: int  # the same for all heads of a curve
    head: str  # its folder
    auroc: Interval
    kl: Interval  # nats
    winners: Mapping[str, Winner]  # by ratio: the head's rule that is best on dev prompts, on test prompts


@dataclass(frozen=True)
class Curve:
    """The heads of all shares on one set of test prompts, the smallest share first."""

    name: str
    num_prompts: int  # test prompts
    points: Sequence[Point]
    last_step: Interval | None  # the gain in AUROC from the second largest share to the largest; None for a single share


def print_curve(curve: Curve, console: Console | None = None) -> None:
    """Print a curve as a table, and whether more prompts would help."""
    console = console or Console()
    table = Table(
        title=f"{curve.name}: {curve.num_prompts} prompts replayed; speed-up, and share of the gap to the ceiling, oracle",
        pad_edge=False,
        collapse_padding=True,
        box=box.SIMPLE_HEAD,
    )
    for column in ("train\nprompts", "epochs", "AUROC", "KL"):
        table.add_column(column, justify="right", no_wrap=True)
    for ratio in curve.points[0].winners:
        table.add_column(f"at {ratio}", justify="right", no_wrap=True)
    for point in curve.points:
        errors = [f"{estimate.value:.4f}\n\u00b1{(estimate.high - estimate.low) / 2:.4f}" for estimate in (point.auroc, point.kl)]
        table.add_row(f"{point.num_prompts:,}", f"{point.num_epochs}", *errors, *map(_cell, point.winners.values()))
    console.print(table)
    if text := conclusion(curve):
        console.print(text, highlight=False)


def _cell(winner: Winner) -> str:
    half = (winner.speedup.high - winner.speedup.low) / 2
    gaps = " ".join("" if gap is None else f"{gap.value:.0%}" for gap in (winner.gap_ceiling, winner.gap_oracle))
    return f"{winner.speedup.value:.3f}x \u00b1{half:.3f}\n{gaps}"


def conclusion(curve: Curve) -> str | None:
    """Return whether more prompts would help, by the last step of a curve; None for a curve of one point."""
    step = curve.last_step
    if step is None:
        return None
    before, after = curve.points[-2:]
    text = f"From {before.num_prompts:,} to {after.num_prompts:,} train prompts AUROC changes by {step.value:+.4f} "
    text += f"[{step.low:+.4f}, {step.high:+.4f}]"
    ratio = preferred(list(after.winners))
    gaps = [] if ratio is None else [point.winners[ratio].gap_ceiling for point in (before, after)]
    shares = [gap.value for gap in gaps if gap is not None]
    if len(shares) == 2:
        text += f", the share of the gap at ratio {ratio} from {shares[0]:.1%} to {shares[1]:.1%}"
    if step.low > 0:
        return f"{text}. It still rises: more prompts (data.num_train=) or responses (generation.responses_per_prompt=) may help."
    if step.high > NOTICEABLE:
        return f"{text}. This many test prompts do not tell whether more train prompts would help; record more with num_prompts=."
    return f"{text}. More prompts are not what heads lack here."
