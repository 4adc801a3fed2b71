"""A probe for its reader: the answer, on the console, as a page and as files."""

from pathlib import Path

from rich.console import Console

from specheads.decoding.step_times import VERIFIED
from specheads.evaluation.conclusions import change, information_text, percent, times
from specheads.evaluation.probe.prediction import BETTER, HEAD, MORE_OVERLAP, Option
from specheads.evaluation.probe.probe import Probed
from specheads.evaluation.reporting import write_page
from specheads.evaluation.tables import Cell, Table, estimate_cell, table_of, terminal

MICRO = 1e6


def print_probe(probed: Probed, console: Console | None = None) -> None:
    """Print what was measured, what each way to decode is predicted to be worth, and the answer."""
    console = console or Console()
    for name, text in _measured(probed):
        console.print(f"{name}: {text}", highlight=False)
    for part in terminal(_options(probed), console.width):
        console.print(part)
    for doubt in probed.doubts:
        console.print(f"unreliable: {doubt}", highlight=False, style="yellow")
    console.print(probed.answer.text, highlight=False, style="bold")


def _measured(probed: Probed) -> list[tuple[str, str]]:
    costs = probed.times.costs
    live = probed.live
    verified = ", ".join(
        f"{count} {costs.verification[count] / costs.target_seconds:.2f}x" for count in VERIFIED
    )
    widths = sorted(option.width for option in probed.options if option.width is not None)
    shares = {width: probed.times.share(f"{HEAD}{width}") for width in widths}
    heads = ", ".join(
        f"{width} wide {f'{share:+.0%}' if share < 1 else 'more than a step'}"
        for width, share in shares.items()
    )
    survived = " ".join(f"{share:.0%}" for share in probed.survival)
    speed = f"{live.tokens_per_second:,.0f} tokens/s, {live.speedup:.2f}x the target alone"
    lost = (
        []
        if probed.unknown is None
        else [("probability of tokens that the draft never proposes", f"{probed.unknown:.2%}")]
    )
    about = probed.information
    known = (
        []
        if about is None
        else [("uncertainty of a drafted token's acceptance", information_text(about))]
    )
    return [
        ("pair", probed.pair),
        ("prompts", f"{probed.num_prompts}, with responses of {probed.num_tokens:,} tokens"),
        ("overlap", f"{percent(probed.overlap)}, the expected acceptance of a drafted token"),
        *lost,
        (f"at least 1 to {len(probed.survival)} tokens accepted", survived),
        *known,
        (
            "a step of the target",
            (
                f"{costs.target_seconds * MICRO:,.0f} us, {costs.ratio:.1f} draft steps of"
                f" {costs.draft_seconds * MICRO:,.0f} us"
            ),
        ),
        ("verifying drafted tokens, over such a step", verified),
        ("what a head adds to a draft step", heads),
        (
            f"decoded as a check ({live.what}, K={live.length})",
            f"{speed} ({live.alone_tokens_per_second:,.0f})",
        ),
    ]


def _options(probed: Probed) -> Table:

    def title(option: Option) -> Cell:
        more = f" ({MORE_OVERLAP:+.0%} overlap)" if option.name == BETTER else ""
        tag = (
            "best" if option.name == probed.answer.choice else "bound" if option.is_bound else None
        )
        return Cell(option.name + more, option.name, tag=tag)

    columns = {
        "way to decode": title,
        "chosen": lambda option: Cell(option.value or None),
        "speed-up": lambda option: estimate_cell(times, option.speedup),
        "over the fixed length": lambda option: estimate_cell(change, option.gain),
    }
    caption = "Speed over the target alone, predicted, with 95 % intervals over prompts"
    return table_of(caption, columns, probed.options, doubtful=False)


def html_of(probed: Probed) -> str:
    """Return the page as text."""
    from specheads.evaluation.page.document import (
        Panel,
        context_section,
        rendered,
        section,
    )  # imports jinja and plotly

    options = section(
        "options",
        "What each way to decode is worth",
        "probe.html",
        panels=[Panel({}, True, _options(probed))],
    )
    return rendered(
        {},
        title=f"Probe: {probed.pair}",
        doubts=probed.doubts,
        overview=_measured(probed),
        notes=[probed.answer.text, f"Next: {probed.answer.command}"],
        sections=[options, *context_section(probed.context)],
    )


def write_probe(probed: Probed, folder: Path) -> list[Path]:
    """Write the probe as a page and as JSON; return the paths."""
    return write_page(folder, "probe", html_of(probed), probed.to_dict())
