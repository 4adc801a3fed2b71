"""`specheads export head=... [format=...]`: check and describe a head, and write it in the format of another decoder."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

from pydantic import AfterValidator

from specheads.commands.main import VERBS
from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead, load_head
from specheads.heads.train_prompts import TrainPrompts
from specheads.integrations.formats import FORMATS
from specheads.pair.revisions import revision_at
from specheads.settings import Settings, Text, fields_of, setting
from specheads.storage.files import without_home

COLUMNS = 80  # of the help text


def _format(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"is not known; use {' or '.join(FORMATS)}")
    return name


class Export(Settings):
    """What is checked, and what is written."""

    head: Text = setting(help="a folder that specheads train exported, or a hub id", min_length=1)
    format: Annotated[Text, AfterValidator(_format)] | None = setting(
        None, "what to write into the head's folder; without it, the head is checked and described"
    )
    draft: Text | None = setting(None, "a draft's folder or hub id, to check that the head was trained for its present revision")


def main() -> None:
    """Run the words of this process's command line, and print the text."""
    print(run(sys.argv[1:]))


def run(words: Sequence[str]) -> str:
    """Run the command line `words`; return the text to print. Raises UserError for a mistake, or a head that is not intact."""
    if {"-h", "--help"} & set(words):
        return help_text()
    given = dict(word.split("=", 1) for word in words if "=" in word)
    if other := [word for word in words if "=" not in word]:
        known = ", ".join(f"{name}=" for name in Export.model_fields)
        raise UserError(f"specheads export: {other[0]!r} is not known; it takes {known}.")
    settings = Export(**given)
    head = load_head(settings.head)
    checked = _checked(settings.head, head, settings.draft)
    if settings.format is None:
        return f"{_description(head)}\n{'files':<12} {checked}"
    if not Path(settings.head).is_dir():
        raise UserError(f"head={settings.head} is on the hub, and files are written into a local folder; give one.")
    if head.golden_inputs is None:
        raise UserError(
            f"head={settings.head} is a checkpoint of the SpecDec++ authors; convert it to a head of this project first: "
            f"python -c \"import specheads; specheads.load_head('{settings.head}').save_pretrained('my-head')\""
        )
    return f"{without_home(str(FORMATS[settings.format].write(head, Path(settings.head))))} written"


def help_text() -> str:
    """Return the help text of the verb."""
    lines = ["usage: specheads export head=<folder> [key=value ...]", "", f"  {VERBS['export'].about}", ""]
    for field in fields_of(Export):
        lines += fill(field.help, COLUMNS, initial_indent=f"  {f'{field.key}=':<10}", subsequent_indent=" " * 12).splitlines()
        if field.key == "format":
            for name, entry in FORMATS.items():
                first = f"{' ' * 12}{name:<14}"
                lines += fill(entry.about, COLUMNS, initial_indent=first, subsequent_indent=" " * 26).splitlines()
    return "\n".join(lines)


def _checked(where: str, head: AcceptanceHead, draft: str | None) -> str:
    """Say that the files of a loaded head are intact; with `draft`, check that it was trained for that draft as it is now."""
    trained = head.config.draft
    if head.golden_inputs is None:
        return "a complete checkpoint of the SpecDec++ authors; it names no draft and has no golden vectors to check"
    if draft is not None and trained.get("revision") != (present := revision_at(draft)):
        raise UserError(
            f"{where} was trained for draft {trained.get('id')} at revision {trained.get('revision')}, but {draft} is at "
            f"revision {present}; train a head for it: specheads train model.draft=..."
        )
    return "unchanged since its export" + ("" if draft is None else f", and trained for the present revision of {draft}")


def _description(head: AcceptanceHead) -> str:
    """Return a description of a head, one property per line."""
    config, size = head.config, sum(weight.numel() for weight in head.parameters())
    rows = {
        "predicts": f"{config.predicts}, from {', '.join(config.inputs)}",
        "overlap": "predicts the expected acceptance before a token is sampled, too" if config.overlap else "not predicted",
        "shape": f"{config.input_size} inputs, width {config.width}, {config.depth} residual blocks, {size:,} parameters",
        "trained on": f"{config.label} labels under {_listed(config.warp)}",
        "draft": f"{config.draft.get('id', 'any')} at {config.draft.get('revision', 'any revision')}",
        "target": f"{config.target.get('id', 'any')} at {config.target.get('revision', 'any revision')}",
        "prompts": _prompts(head.train_prompts),
        "calibrated": "no" if config.calibration is None else f"by {len(config.calibration['slope'])} indices in a round",
        "recommended": _listed(config.recommended or {}) or "nothing yet; specheads evaluate chooses a threshold",
        "held out": _listed(config.train.get("test") or {}) or "not known",
    }
    return "\n".join(f"{name:<12} {value}" for name, value in rows.items())


def _prompts(learned: TrainPrompts | None) -> str:
    if learned is None:
        return "not known"
    return f"trained on {len(learned.train):,}, calibrated on {len(learned.dev):,}; evaluations do not report on them"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items())
