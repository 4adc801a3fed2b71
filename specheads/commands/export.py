"""`specheads export`: check and describe a head, write it in the format of another decoder, or
print an engine's settings.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Literal

from specheads.commands.verbs import VERBS, arguments
from specheads.errors import UserError
from specheads.evaluation.keys import MEASURED, Kind
from specheads.integrations.engines import ENGINES, Json, drafting_of
from specheads.pair.locations import check_available
from specheads.settings import Settings, Text, fields_of, setting
from specheads.storage.files import read_json, without_home

# What is written into the folder of a head.
FORMATS = {
    "standalone": "acceptance_head.py, which needs torch and safetensors alone",
    "onnx": "head.onnx, for onnxruntime (pip install 'specheads[onnx]')",
}


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
    check_available("head", settings.head)
    from specheads.commands.exported_head import described, written  # they import torch

    if settings.format is None:
        return described(settings.head)
    return f"{without_home(str(written(settings.head, settings.format)))} written"


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
        comparison = _comparison_at(report, settings.ratio)
        given = drafting_of(report, settings.ratio, _length(comparison))
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


def _comparison_at(report: Json, ratio: str) -> Json:
    """Return what the answer of a report says at one ratio of costs.

    Raises UserError for a ratio that it does not have.
    """
    answer = report["answer"]
    known = {each["ratio"]: each for each in (answer["comparison"], *answer["others"])}
    if ratio not in known:
        raise UserError(
            f"ratio={ratio}: the report has no answer at it, expected one of {', '.join(known)}."
        )
    return known[ratio]


def _length(comparison: Json) -> int:
    """Return the best fixed length; 0 where the target alone is to be used."""
    if comparison["use"] == Kind.ALONE:
        return 0
    return int(comparison["choices"][Kind.FIXED]["parameters"]["num_tokens"])


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
    abouts = FORMATS | {name: about for name, (about, _) in ENGINES.items()}
    for name, about in abouts.items():
        lines.append(fill(f"  {name:<13} {about}", 80, subsequent_indent=" " * 16))
    return "\n".join(lines)
