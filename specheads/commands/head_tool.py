"""The verbs of `specheads` without a config: describe, check, export heads, rewrite cards, send results, theory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from specheads.commands.theory import theory
from specheads.commands.verbs import TOOLS
from specheads.errors import UserError
from specheads.evaluation.pair_result import write_pair_result
from specheads.heads.card import card
from specheads.heads.checkpoint import load_head
from specheads.heads.train_prompts import TrainPrompts
from specheads.integrations.formats import FORMATS
from specheads.revisions import revision_at
from specheads.storage.files import without_home, write_whole

COLUMNS = 80  # of help texts
HEAD = {"head": "a folder that specheads train exported, or a hub id"}


@dataclass(frozen=True)
class Verb:
    """One verb of the command: its required and optional keys, a sentence of help for each, and its function."""

    required: dict[str, str]
    optional: dict[str, str]
    run: Callable[..., str]


def inspect(head: str) -> str:
    """Return a description of a head, one property per line."""
    loaded = load_head(head)
    config, size = loaded.config, sum(weight.numel() for weight in loaded.parameters())
    rows = {
        "predicts": f"{config.predicts}, from {', '.join(config.inputs)}",
        "overlap": "predicts the expected acceptance before a token is sampled, too" if config.overlap else "not predicted",
        "shape": f"{config.input_size} inputs, width {config.width}, {config.depth} residual blocks, {size:,} parameters",
        "trained on": f"{config.label} labels under {_listed(config.warp)}",
        "draft": f"{config.draft.get('id', 'any')} at {config.draft.get('revision', 'any revision')}",
        "target": f"{config.target.get('id', 'any')} at {config.target.get('revision', 'any revision')}",
        "prompts": _prompts(loaded.train_prompts),
        "calibrated": "no" if config.calibration is None else f"by {len(config.calibration['slope'])} indices in a round",
        "recommended": _listed(config.recommended or {}) or "nothing yet; specheads evaluate chooses a threshold",
        "held out": _listed(config.train.get("test") or {}) or "not known",
    }
    return "\n".join(f"{name:<12} {value}" for name, value in rows.items())


def verify(head: str, draft: str | None = None) -> str:
    """Load a head strictly, with its golden vectors; with `draft`, check that it was trained for that draft as it is now."""
    loaded = load_head(head)
    trained = loaded.config.draft
    if loaded.golden_inputs is None:
        return f"{head}: a complete checkpoint of the SpecDec++ authors; it names no draft and has no golden vectors to check"
    if draft is not None and trained.get("revision") != (present := revision_at(draft)):
        raise UserError(
            f"{head} was trained for draft {trained.get('id')} at revision {trained.get('revision')}, but {draft} is at revision "
            f"{present}; train a head for it: specheads train model.draft=..."
        )
    trained_for = "" if draft is None else f", and trained for the present revision of {draft}"
    return f"{head}: unchanged since its export{trained_for}"


def rewrite_card(head: str) -> str:
    """Rewrite the card of a local head from its config, to which an evaluation may have added results."""
    loaded, path = load_head(head), Path(head) / "README.md"
    if not path.parent.is_dir():
        raise UserError(f"head={head} is on the hub, and a card is written into a local folder; give one.")
    write_whole(path, lambda temporary: temporary.write_text(card(loaded.config)))
    return f"{without_home(str(path))} written"


def export(head: str, format: str) -> str:
    """Write a local head in the format of another decoder; return a message with its path."""
    loaded = load_head(head)
    if format not in FORMATS:
        raise UserError(f"format={format} is not known; use {' or '.join(FORMATS)}.")
    if not Path(head).is_dir():
        raise UserError(f"head={head} is on the hub, and files are written into a local folder; give one.")
    if loaded.golden_inputs is None:
        raise UserError(
            f"head={head} is a checkpoint of the SpecDec++ authors; convert it to a head of this project first: "
            f"python -c \"import specheads; specheads.load_head('{head}').save_pretrained('my-head')\""
        )
    return f"{without_home(str(FORMATS[format].write(loaded, Path(head))))} written"


VERBS = {
    "inspect": Verb(HEAD, {}, inspect),
    "verify": Verb(
        HEAD, {"draft": "folder or hub id of a draft, to check that the head was trained for its present revision"}, verify
    ),
    "export": Verb(
        HEAD | {"format": "one of:" + "".join(f"\n{name:<13} {entry.about}" for name, entry in FORMATS.items())}, {}, export
    ),
    "card": Verb(HEAD, {}, rewrite_card),
    "result": Verb({"report": "the folder of a run of specheads evaluate"}, {}, write_pair_result),
    "theory": Verb(
        {},
        {
            "out": "the folder of theory.json and the figures; outputs/theory",
            "seed": "of random models and simulations; 0",
            "data": "a folder of specheads data with rollouts, whose drafts are counted, too",
        },
        theory,
    ),
}


def help_text(verbs: Sequence[str] = tuple(VERBS)) -> str:
    """Return the help text of some verbs."""
    lines = ["usage: specheads <verb> key=value ...", ""]
    for name in verbs:
        verb = VERBS[name]
        lines.append(f"  {name:<10} {TOOLS[name]}")
        explained = verb.required | {key: f"{about} (optional)" for key, about in verb.optional.items()}
        for key, about in explained.items():
            lines += _wrapped(f"    {f'{key}=':<12} ", about)
    return "\n".join(lines)


def _wrapped(first: str, about: str) -> list[str]:
    """Return `first` with an explanation as lines that fit a terminal; further lines of it are names with theirs."""
    sentence, *names = about.splitlines()
    indent = " " * (len(first) + 2)
    lines = fill(sentence, COLUMNS, initial_indent=first, subsequent_indent=indent).splitlines()
    for name in names:
        lines += fill(name, COLUMNS, initial_indent=indent, subsequent_indent=indent + " " * 14).splitlines()
    return lines


def run(arguments: Sequence[str]) -> str:
    """Run one of the verbs; return the text to print. Raises UserError for arguments that are not allowed."""
    name, *rest = arguments
    if {"-h", "--help"} & set(rest):
        return help_text([name])
    verb, given = VERBS[name], {}
    keys = verb.required | verb.optional
    for argument in rest:
        key, equals, value = argument.partition("=")
        if not equals or key not in keys:
            raise UserError(f"specheads {name}: {argument!r} is not known; it takes {', '.join(f'{key}=' for key in keys)}.")
        given[key] = value
    if missing := [key for key in verb.required if not given.get(key)]:
        raise UserError(f"specheads {name} needs {missing[0]}=: {verb.required[missing[0]]}.")
    return verb.run(**given)


def _prompts(learned: TrainPrompts | None) -> str:
    if learned is None:
        return "not known"
    return f"trained on {len(learned.train):,}, calibrated on {len(learned.dev):,}; evaluations do not report on them"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items())
