"""A probe on the console, and the texts that its page shows too."""

from rich.console import Console
from rich.table import Table

from specheads.decoding.step_times import VERIFIED
from specheads.evaluation.number_text import percent, percent_limits, times, times_limits
from specheads.evaluation.probe.prediction import BETTER, HEAD, MORE_OVERLAP, Option
from specheads.evaluation.probe.probe import Probed

MICRO = 1e6


def print_probe(probed: Probed, console: Console | None = None) -> None:
    """Print what was measured, what each way to decode is predicted to be worth, and the answer."""
    console = console or Console()
    for line in measured(probed):
        console.print(f"{line[0]}: {line[1]}", highlight=False)
    table = Table(title="speed over the target alone, predicted; 95 % intervals over prompts")
    for column in ("way to decode", "speed-up", "chosen"):
        table.add_column(column, no_wrap=column == "speed-up")
    for option in probed.options:
        table.add_row(title_of(option), f"{times(option.speedup)} {times_limits(option.speedup)}", option.value)
    console.print(table)
    for assumption in probed.not_measured:
        console.print(f"not measured: {assumption}", highlight=False)
    for doubt in probed.doubts:
        console.print(f"not to be trusted: {doubt}", highlight=False, style="yellow")
    console.print(probed.answer.text, highlight=False, style="bold")


def measured(probed: Probed) -> list[tuple[str, str]]:
    """Return what was measured, as names with texts."""
    costs, live = probed.times.costs, probed.live
    verified = ", ".join(f"{count} {costs.verification[count] / costs.target_seconds:.2f}x" for count in VERIFIED)
    widths = sorted(option.width for option in probed.options if option.width is not None)
    heads = ", ".join(f"{width} wide {probed.times.share(f'{HEAD}{width}'):+.0%}" for width in widths)
    survived = " ".join(f"{share:.0%}" for share in probed.survival)
    checked: list[tuple[str, str]] = []
    if live is not None:
        speed = f"{live.tokens_per_second:,.0f} tokens/s, {live.speedup:.2f}x the target alone"
        speed += f" ({live.alone_tokens_per_second:,.0f})"
        checked = [(f"decoded as a check, {live.num_prompts} prompts with K={live.length}", speed)]
    lost = [] if probed.unknown is None else [("probability of tokens that the draft does not know", f"{probed.unknown:.2%}")]
    return [
        ("pair", probed.pair),
        ("prompts", f"{probed.num_prompts}, with responses of {probed.num_tokens:,} tokens"),
        ("overlap", f"{percent(probed.overlap)} {percent_limits(probed.overlap)}, the expected acceptance of a drafted token"),
        *lost,
        (f"at least 1 to {len(probed.survival)} tokens accepted", survived),
        (
            "a step of the target",
            f"{costs.target_seconds * MICRO:,.0f} us, {costs.ratio:.1f} draft steps of {costs.draft_seconds * MICRO:,.0f} us",
        ),
        ("verifying drafted tokens, over such a step", verified),
        ("what a head adds to a draft step", heads),
        *checked,
    ]


def title_of(option: Option) -> str:
    """Return the name of an option, with what it stands for where that is no way to decode."""
    if option.name == BETTER:
        return f"{option.name} ({MORE_OVERLAP:+.0%} overlap)"
    return f"{option.name} (a bound)" if option.is_bound else option.name
