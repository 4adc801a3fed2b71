"""Reports and probes on the console; reports as files, and in Weights & Biases."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from specheads.decoding.step_times import VERIFIED
from specheads.evaluation import conclusions
from specheads.evaluation.answer import ratios_of, winners_at
from specheads.evaluation.conclusions import change, information_text, percent, times
from specheads.evaluation.probe.prediction import BETTER, MORE_OVERLAP, Option
from specheads.evaluation.probe.probe import Probed
from specheads.evaluation.report import Answer, Report
from specheads.evaluation.tables import (
    answer_table,
    batch_table,
    estimate_cell,
    live_table,
    table_of,
    winners_table,
)
from specheads.storage.files import write_json, write_whole
from specheads.table import Cell, Table, print_table

logger = logging.getLogger(__name__)


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.html and report.json; return their paths."""
    from specheads.evaluation.page.document import html_of  # slow to import

    if find_spec("plotly") is None:
        logger.warning(
            "the page has no plots; install plotly (pip install 'specheads[plots]') and evaluate"
            " again, recordings are kept"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "report.html", folder / "report.json"]
    write_whole(written[0], lambda path: path.write_text(html_of(report), encoding="utf-8"))
    write_json(written[1], asdict(report))
    return written


def print_report(report: Report, console: Console | None = None, verbose: bool = False) -> None:
    """Print what to use and what that rests on.

    With `verbose`, all tables of the test prompts before it.
    """
    console = console or Console()
    if verbose:
        _print_tables(report, console)
    if report.answer is not None:
        _print_answer(report, report.answer, console)
    for batches in [] if report.is_unreliable else report.batches:
        row = conclusions.fastest_of(batches)
        _say(
            console,
            f"{batches.concurrency} requests at once: {row.name} was the fastest on these same"
            f" prompts, {row.over_alone:.2f}× the target alone.",
        )
    _say(console, *conclusions.warnings_of(report))


def _say(console: Console, *texts: str, style: str = "") -> None:
    for text in texts:
        console.print(text, highlight=False, markup=False, style=style)


def _print_tables(report: Report, console: Console) -> None:
    tests = [data for data in report.data_sets if data.role == "test"]
    for data in tests:
        for ratio in ratios_of(report):
            if winners_at(data, ratio):
                print_table(winners_table(report, data, ratio), console)
    for data in tests:
        if data.information:
            _say(console, f"{data.name}: {conclusions.information_text(data.information)}.")
    if report.live:
        print_table(live_table(report), console)
    for batches in report.batches:
        print_table(batch_table(report, batches), console)
    _say(console, *report.doubts)


def _print_answer(report: Report, answer: Answer, console: Console) -> None:
    if text := conclusions.disagreement_text(answer):
        _say(console, text, style="yellow")
    _say(console, f"Use: {answer.setting}", style="bold")
    _say(console, conclusions.use_text(answer.comparison))
    if text := conclusions.tie_text(answer.comparison):
        _say(console, text)
    _say(console, conclusions.evidence_text(answer), *conclusions.decoded_texts(answer))
    if text := conclusions.doubt_text(answer):
        _say(console, text, style="yellow")
    print_table(answer_table(report, answer.comparison), console)
    changes = conclusions.changes_text(report, answer)
    _say(console, f"Another cost ratio changes the winner: {changes}.")


def log_report(report: Report, loggers: Sequence[object]) -> None:
    """Log the page to every W&B logger of Lightning; others have no place for it."""
    from lightning.pytorch.loggers import WandbLogger  # slow to import

    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            from specheads.evaluation.page.document import html_of  # slow to import

            context = {key: value for key, value in report.context.items() if key != "config"}
            logger.log_hyperparams(context | {"doubts": list(report.doubts)})
            logger.experiment.log({"report": wandb.Html(html_of(report), inject=False)})


MICRO = 1e6


def print_probe(probed: Probed, console: Console | None = None) -> None:
    """Print what was measured, what each way to decode is predicted to be worth, and the answer."""
    console = console or Console()
    _say(console, *(f"unreliable: {doubt}" for doubt in probed.doubts), style="yellow")
    _say(console, *(f"{name}: {text}" for name, text in _measured(probed).items()))
    print_table(_options(probed), console)
    _say(console, probed.answer.text, style="bold")


def _measured(probed: Probed) -> dict[str, str]:
    """Return what was measured: texts by their titles."""
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
    return titled


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
