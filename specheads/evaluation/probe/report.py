"""A probe for its reader: what was measured, what each way to decode is worth, and the answer."""

from rich.console import Console

from specheads.decoding.step_times import VERIFIED
from specheads.evaluation.conclusions import change, information_text, percent, times
from specheads.evaluation.probe.prediction import BETTER, MORE_OVERLAP, Option
from specheads.evaluation.probe.probe import Probed
from specheads.evaluation.tables import estimate_cell, table_of
from specheads.table import Cell, Table, print_table

MICRO = 1e6


def print_probe(probed: Probed, console: Console | None = None) -> None:
    """Print what was measured, what each way to decode is predicted to be worth, and the answer."""
    console = console or Console()
    for name, text in _measured(probed):
        console.print(f"{name}: {text}", highlight=False)
    print_table(_options(probed), console)
    for doubt in probed.doubts:
        console.print(f"unreliable: {doubt}", highlight=False, style="yellow")
    console.print(probed.answer.text, highlight=False, style="bold")


def _measured(probed: Probed) -> list[tuple[str, str]]:
    """Return what was measured: titles with texts."""
    costs = probed.times.costs
    live = probed.live
    titled = {
        "pair": probed.pair,
        "prompts": f"{probed.num_prompts}, with responses of {probed.num_tokens:,} tokens",
        "overlap": f"{percent(probed.overlap)}, the expected acceptance of a drafted token",
    }
    if probed.unknown is not None:
        titled["probability of tokens that the draft never proposes"] = f"{probed.unknown:.2%}"
    if probed.information is not None:
        uncertainty = information_text(probed.information)
        titled["uncertainty of a drafted token's acceptance"] = uncertainty
    titled["a step of the target"] = (
        f"{costs.target_seconds * MICRO:,.0f} us, {costs.ratio:.1f} draft steps of"
        f" {costs.draft_seconds * MICRO:,.0f} us"
    )
    verified = list[str]()
    for count in VERIFIED:
        verified.append(f"{count} {costs.verification[count] / costs.target_seconds:.2f}x")
    titled["verifying drafted tokens, over such a step"] = ", ".join(verified)
    heads = list[str]()
    for width, seconds in probed.heads.items():
        share = seconds / costs.draft_seconds
        heads.append(f"{width} wide {f'{share:+.0%}' if share < 1 else 'more than a step'}")
    titled["what a head adds to a draft step"] = ", ".join(heads)
    titled[f"decoded as a check ({live.num_prompts} prompts, K={live.length})"] = (
        f"{live.tokens_per_second:,.0f} tokens/s, {live.speedup:.2f}x the target alone"
        f" ({live.alone_tokens_per_second:,.0f})"
    )
    return list(titled.items())


def _options(probed: Probed) -> Table:
    def title(option: Option) -> Cell:
        more = f" ({MORE_OVERLAP:+.0%} overlap)" if option.name == BETTER else ""
        tag = "bound" if option.is_bound else None
        if option.name == probed.answer.choice:
            tag = "best"
        return Cell(option.name + more, option.name, tag=tag)

    columns = {
        "way to decode": title,
        "chosen": lambda option: Cell(option.value or None),
        "speed-up": lambda option: estimate_cell(times, option.speedup),
        "over the fixed length": lambda option: estimate_cell(change, option.gain),
    }
    caption = "Speed over the target alone, predicted, with 95 % intervals over prompts"
    return table_of(caption, columns, probed.options, doubtful=False)
