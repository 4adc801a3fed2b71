"""`specheads export`: check and describe a head, write it in the format of another decoder, or
print an engine's settings.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Literal

from specheads.commands.verbs import VERBS, arguments
from specheads.errors import UserError
from specheads.evaluation.report import MEASURED, Kind
from specheads.heads.card import properties, recommendation
from specheads.heads.head import AcceptanceHead, load_head
from specheads.integrations.formats import ENGINES, FORMATS, comparison_at, drafting_of
from specheads.settings import Settings, Text, fields_of, setting
from specheads.storage.files import read_json, without_home


class Export(Settings):
    """What is checked, and what is written."""

    head: Text | None = setting(
        None, "a folder that specheads train exported, or a hub id", min_length=1
    )
    format: Literal["standalone", "onnx", "vllm", "tensorrt-llm", "llama.cpp", "sglang"] | None = (
        setting(
            None,
            "what to write into the head's folder, or to print of a report; without it, the head is"
            " checked and described",
        )
    )
    report: Text | None = setting(
        None,
        "a folder of specheads evaluate, whose best lengths of drafts an engine's settings get",
    )
    ratio: Text = setting(
        MEASURED,
        "the ratio of costs for which they are: measured on this machine, or one of the report's",
    )


def main() -> None:
    """Run the words of this process's command line, and print the text."""
    print(run(sys.argv[1:]))


def run(words: Sequence[str]) -> str:
    """Run the command line `words`; return the text to print.

    Raises UserError for a mistake, or a head that is not intact.
    """
    if {"-h", "--help"} & set(words):
        return help_text()
    settings = Export(**arguments("export", words, list(Export.model_fields)))
    if settings.report is not None or settings.format in ENGINES:
        return _engine_settings(settings)
    if settings.head is None:
        raise UserError(
            "specheads export: head=<folder> is missing, or report=<folder> of an evaluation."
        )
    head = load_head(settings.head)
    if settings.format is None:
        return _description(head)
    if not Path(settings.head).is_dir():
        raise UserError(
            f"head={settings.head} is on the hub, and files are written into a local folder; give"
            " one."
        )
    if head.golden_inputs is None:
        raise UserError(
            f"head={settings.head} is a checkpoint of the SpecDec++ authors; convert it first:"
            f" specheads.load_head('{settings.head}').save_pretrained('my-head')"
        )
    _, write = FORMATS[settings.format]
    return f"{without_home(str(write(head, Path(settings.head))))} written"


def _engine_settings(settings: Export) -> str:
    """Return the settings of an engine.

    Raises UserError for a report that cannot be read, or that says not to draft.
    """
    if settings.format not in ENGINES or settings.report is None:
        raise UserError(
            "specheads export: an engine's settings need report=<folder> of an evaluation and"
            f" format={', '.join(ENGINES)}."
        )
    path = Path(settings.report) / "report.json"
    version, write = ENGINES[settings.format]
    try:
        report = read_json(path)
        given = drafting_of(report, settings.ratio)
        comparison = comparison_at(report, settings.ratio)
        doubts = report["doubts"] if settings.ratio == MEASURED else ()
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); give the folder of a run of specheads evaluate."
        ) from None
    remarks = [f"# for {version}, by {without_home(str(path))} at ratio {settings.ratio}"]
    if comparison["use"] != Kind.FIXED:
        used = comparison["choices"][comparison["use"]]["name"]
        remarks.append(f"# the evaluation recommends {used}; engines have fixed lengths alone")
    remarks += [f"# its timing is doubtful: {doubt}" for doubt in doubts]
    return "\n".join([*remarks, write(given)])


def help_text() -> str:
    """Return the help text of the verb."""
    lines = [
        "usage: specheads export head=<folder> [format=...]",
        "       specheads export report=<folder> format=<engine>",
        "",
        f"  {VERBS['export'].about}",
        "",
    ]
    for key, text in fields_of(Export).items():
        lines.append(fill(f"  {key + '=':<9} {text}", 80, subsequent_indent=" " * 12))
    lines.append("\nformats:")
    for name, (about, _) in (FORMATS | ENGINES).items():
        lines.append(fill(f"  {name:<13} {about}", 80, subsequent_indent=" " * 16))
    return "\n".join(lines)


def _description(head: AcceptanceHead) -> str:
    config = head.config
    learned = head.train_prompts
    rows = properties(config) | {
        "parameters": f"{sum(weight.numel() for weight in head.parameters()):,}",
        "prompts": "not known",
        "recommended": recommendation(config)
        or "nothing yet; specheads evaluate chooses a threshold",
        "held out": _listed(config.train.get("test") or {}) or "not known",
        "files": "unchanged since its export",
    }
    if learned is not None:
        rows["prompts"] = (
            f"trained on {len(learned.train):,}, calibrated on {len(learned.dev):,}; evaluations do"
            " not report on them"
        )
    if head.golden_inputs is None:
        rows["files"] = (
            "a complete checkpoint of the SpecDec++ authors; it names no draft and has no golden"
            " vectors to check"
        )
    return "\n".join(f"{name:<15} {value}" for name, value in rows.items())


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in values.items()
    )
