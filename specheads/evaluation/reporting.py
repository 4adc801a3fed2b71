"""The report of an evaluation: made of the outcome of its steps, as files, on the console, and on
Weights & Biases.
"""

import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from specheads.decoding import stopping
from specheads.decoding.verification import BlockVerification
from specheads.evaluation import conclusions
from specheads.evaluation.candidates import FIXED, Candidate, written
from specheads.evaluation.replayed_sets import Results, recommendations
from specheads.evaluation.report import LiveRow, Report, TextSample, Verdict
from specheads.evaluation.rows import data_set, live_rows, reliability, text_samples
from specheads.evaluation.setup import Setup, device_name, load_average, versions
from specheads.evaluation.tables import (
    batch_table,
    live_table,
    verdict_table,
    winners_table,
)
from specheads.heads.head_folder import store_in_config
from specheads.pair.pair import Pair
from specheads.replay.information import information
from specheads.replay.intervals import interval
from specheads.replay.replay import recorded_head, replay
from specheads.storage.files import without_home, write_json, write_whole
from specheads.table import Table, print_table

logger = logging.getLogger(__name__)


def report_of(
    setup: Setup, results: Results, config: str | None = None, command: str = "specheads evaluate"
) -> Report:
    """Return the report.

    `config` is the text of the configuration, None: the settings, `command` the words of its
    command.
    """
    measured = results.measured
    steps = results.cost_table.steps
    live = (
        live_rows(results, setup.settings.verification.lossless, setup.prompts.decoded.groups)
        if measured
        else []
    )
    heads = {name: recorded_head(head) for name, head in setup.heads.items()}
    sets = [] if results.dev is None else [results.dev, *results.tests]
    report = Report(
        context=context_of(setup, config, num_decoded=len(measured[0].stats) if measured else 0),
        steps=None if steps is None else steps.estimate,
        ratio=None if steps is None else interval(steps.ratios()),
        doubts=results.doubts,
        live=live,
        data_sets=[
            replace(
                data_set(each, results),
                reliability=reliability(each.recording, heads),
                information=information([each.recording], heads, each.groups),
            )
            for each in sets
        ],
        batches=results.batches,
        notes=setup.prompts.notes(),
    )
    if (verdict := conclusions.verdict_of(report, results.uses)) is None:
        return report
    texts = _texts(setup.pair, results, verdict) if sets else []
    return replace(
        report, verdict=_with_code(setup, results, report, verdict, command), texts=texts
    )


def _with_code(
    setup: Setup, results: Results, report: Report, verdict: Verdict, command: str
) -> Verdict:
    """Return the verdict with the command that makes its setting, and with Python that decodes with
    it.
    """
    name = verdict.answer.choices[verdict.answer.use].name
    known = [*(each.setting for each in results.measured), *results.candidates]
    rule = next((each for each in known if each.name == name and each.rule_name), None)
    # The target alone; or other drafts, which the command line names
    if rule is None or not setup.settings.can_replay:
        return verdict
    block = conclusions.faster_verification(report, name)
    words = _command_words(setup, rule, block)
    return replace(
        verdict,
        command=f"{command} {shlex.join(words)}",
        python=_python(setup, rule, block),
    )


def _command_words(setup: Setup, rule: Candidate, verification: LiveRow | None) -> list[str]:
    """Return the words of a command line that evaluates a rule, under another verification rule if
    that was faster.
    """
    located = setup.located_heads.get(rule.head or "")
    words = [f"stopping=[{','.join(dict.fromkeys((FIXED, rule.rule_name)))}]"]
    for key, value in rule.arguments.items():
        if value is not None:
            words.append(f"stopping.{rule.rule_name}.{key}={written(value)}")
    words.append(f"head={without_home(located.where)}" if located else "head=null")
    if verification is not None:  # it is decoded: a recording predicts token verification only
        words += [f"verification={verification.verification}", f"live_rules=[{rule.rule_name}]"]
    return words


def _python(setup: Setup, rule: Candidate, verification: LiveRow | None) -> str:
    """Return Python that decodes with a rule, under another verification rule if that was
    faster.
    """
    pair = setup.pair
    cls = type(rule.live)
    located = setup.located_heads.get(rule.head or "")
    arguments = ["head"] if located else []
    for key, value in rule.arguments.items():
        if value is not None:
            arguments.append(f"{key}={value!r}")
    made = ", ".join(arguments)
    warp = ", ".join(f"{key}={value!r}" for key, value in setup.settings.warp.values().items())
    is_embedded = pair.target_id.startswith("embedded:")
    ids = repr(pair.name) if is_embedded else f"draft={pair.draft_id!r}, target={pair.target_id!r}"
    is_ours = hasattr(stopping, cls.__name__)
    place = "specheads.stopping." if is_ours else ""
    lines = ["import specheads"]
    if not is_ours:
        lines.append(f"from {cls.__module__} import {cls.__name__}")
    lines += ["", f"pair = specheads.load_pair({ids})"]
    if located:
        lines.append(f"head = specheads.load_head({without_home(located.where)!r})")
    lines += [f"rule = {place}{cls.__name__}({made})", f"warp = specheads.Warp({warp})"]
    more = ""
    if verification is not None:
        more = f", verification=specheads.verification.{BlockVerification.__name__}()"
    lines.append(f"decoder = specheads.SpeculativeDecoder(pair, stopping=rule, warp=warp{more})")
    most = setup.settings.max_new_tokens
    lines.append(f'print(decoder.generate("def mean(values):", max_new_tokens={most}).text)')
    return "\n".join(lines)


def _texts(pair: Pair, results: Results, verdict: Verdict) -> list[TextSample]:
    """Return responses in pieces, as each setting that there is to choose from drafts them."""
    names = {choice.name for choice in verdict.answer.choices.values()}
    rules = {rule.name: rule for rule in results.candidates if rule.name in names}.values()
    recording = results.reported.recording
    drafting = [rule.rule for rule in rules if rule.rule is not None]
    samples = []
    for rule, rounds in zip(rules, replay(recording, drafting), strict=True):
        samples += text_samples(pair, recording, rule, rounds)
    return samples


def context_of(setup: Setup, config: str | None = None, num_decoded: int = 0) -> dict[str, Any]:
    """Return the description of the evaluation for its report.

    `num_decoded` prompts were decoded.
    """
    settings = setup.settings
    pair = setup.pair
    plain = json.loads(
        json.dumps(dict(settings), default=repr)
    )  # rules and other objects as Python shows them
    return {
        "model": pair.name,
        "target": pair.target_id,
        "target_revision": pair.target_revision,
        "draft": pair.draft_id,
        "draft_revision": pair.draft_revision,
        "dtype": [str(pair.target.dtype), str(pair.draft.dtype)],
        "heads": [without_home(located.where) for located in setup.located_heads.values()],
        "warp": settings.warp.values(),
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "num_live_prompts": num_decoded,
        "repeats": settings.repeats,
        "verification": settings.verification.label,
        "lossless": settings.verification.lossless,
        "costs": {"head_shares": setup.head_sizes},
        "device": device_name(pair),
        "threads": torch.get_num_threads(),
        "load": {"start": setup.load, "end": load_average()},
        "versions": versions(),
        **setup.prompts.context(),
        "config": config or yaml.safe_dump(plain, sort_keys=False, allow_unicode=True),
    }


def recommend(setup: Setup, results: Results, report: Report) -> None:
    """Store the best setting in each local head, None where something else was faster."""
    for folder, values in recommendations(setup, results, report).items():
        try:
            store_in_config(folder, recommended=values)
        except OSError as error:
            logger.warning("nothing could be stored in %s (%s)", folder, error.strerror)
            continue
        what = "no threshold, for another setting was faster"
        if values is not None:
            verification = ""
            if "verification" in values:
                verification = f" under {values['verification']} verification"
            what = f"threshold {values['threshold']:g}, for threshold=auto{verification}"
        logger.info("%s now holds %s", folder, what)


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.html and report.json; return their paths."""
    from specheads.evaluation.page.document import html_of  # imports plotly

    return write_page(folder, "report", html_of(report), asdict(report))


def write_page(folder: Path, name: str, html: str, content: Any) -> list[Path]:
    """Write a page as <name>.html and its content as <name>.json; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}.html", folder / f"{name}.json"]
    write_whole(written[0], lambda path: path.write_text(html, encoding="utf-8"))
    write_json(written[1], content)
    return written


def print_report(report: Report, console: Console | None = None, verbose: bool = False) -> None:
    """Print what to use and what that rests on.

    With `verbose`, all tables of the test prompts before it.
    """
    console = console or Console()

    def say(*texts: str, style: str = "") -> None:
        for text in texts:
            console.print(text, highlight=False, markup=False, style=style)

    def show(*tables: Table) -> None:
        for table in tables:
            print_table(table, console)

    tests = [data for data in report.data_sets if data.role == "test"]
    ratios = conclusions.ratios_of(report)
    if verbose:
        show(
            *(
                winners_table(report, data, ratio)
                for data in tests
                for ratio in ratios
                if conclusions.winners_at(data, ratio)
            )
        )
        say(
            *(
                f"{data.name}: {conclusions.information_text(data.information)}."
                for data in tests
                if data.information
            )
        )
        show(
            *([live_table(report)] if report.live else []),
            *(batch_table(report, batches) for batches in report.batches),
        )
        say(*report.doubts)
    if (verdict := report.verdict) is not None:
        answer = verdict.answer
        say(f"Use: {answer.choices[answer.use].name}", style="bold")
        say(conclusions.use_text(answer), verdict.rests_on, *verdict.decoded)
        say(*([f"Timing unreliable here: {verdict.doubt}."] if verdict.doubt else []))
        show(verdict_table(report, answer))
        say(*([f"Skip the head: {answer.skip_head}."] if answer.skip_head else []))
        say(f"Another ratio changes the winner: {conclusions.changes_text(report, verdict)}.")
    for batches in [] if report.doubts else report.batches:
        row = conclusions.fastest_of(batches)
        speed = (
            f"{row.name} was the fastest on these same prompts, {row.over_alone:.2f}× the target"
            " alone"
        )
        say(f"{batches.concurrency} requests at once: {speed}.")
    say(*conclusions.warnings_of(report))


def log_report(report: Report, loggers: Sequence[Any]) -> None:
    """Log the page to every W&B logger of Lightning; others have no place for it."""
    from lightning.pytorch.loggers import WandbLogger  # slow to import

    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            from specheads.evaluation.page.document import html_of  # imports plotly

            context = {key: value for key, value in report.context.items() if key != "config"}
            logger.log_hyperparams(context | {"doubts": list(report.doubts)})
            logger.experiment.log({"report": wandb.Html(html_of(report), inject=False)})
