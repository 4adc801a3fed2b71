"""The `specheads` command: look at a head, check that it is what it was, take it elsewhere, write its card anew."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specheads.errors import UserError, user_error
from specheads.heads.card import card
from specheads.heads.checkpoint import load_head
from specheads.heads.train_prompts import TrainPrompts
from specheads.integrations.formats import FORMATS
from specheads.revisions import revision_at
from specheads.storage.files import write_whole

EXIT_USER_ERROR = 2
HEAD = {"head": "a folder that train.py exported, or a hub id"}


@dataclass(frozen=True)
class Verb:
    """One thing that the command does: what it needs and may be given, by key, and the function that does it."""

    about: str
    needs: dict[str, str]
    takes: dict[str, str]
    run: Callable[..., str]


def inspect(head: str) -> str:
    """Return what a head is, in lines."""
    found = load_head(head)
    config, size = found.config, sum(weight.numel() for weight in found.parameters())
    rows = {
        "predicts": f"{config.predicts}, from {', '.join(config.inputs)}",
        "shape": f"{config.input_size} inputs, width {config.width}, {config.depth} residual blocks, {size:,} parameters",
        "learnt": f"{config.label} labels under {_listed(config.warp)}",
        "draft": f"{config.draft.get('id', 'any')} at {config.draft.get('revision', 'any revision')}",
        "target": f"{config.target.get('id', 'any')} at {config.target.get('revision', 'any revision')}",
        "prompts": _prompts(found.train_prompts),
        "calibrated": "no" if config.calibration is None else f"by {len(config.calibration['slope'])} indices in a round",
        "recommended": _listed(config.recommended or {}) or "nothing yet; evaluate.py finds a threshold",
        "held out": _listed(config.train.get("test") or {}) or "not known",
    }
    return "\n".join(f"{name:<12} {value}" for name, value in rows.items())


def verify(head: str, draft: str | None = None) -> str:
    """Load a head strictly, its golden vectors included; with `draft`, check that it was trained for that model as it is now."""
    found = load_head(head)
    trained = found.config.draft
    if found.golden_inputs is None:
        return f"{head}: a whole checkpoint of the SpecDec++ authors', which does not say for which draft, nor what it gave when it was saved"
    if draft is not None and trained.get("revision") != (here := revision_at(draft)):
        raise UserError(
            f"{head} was trained for draft {trained.get('id')} at revision {trained.get('revision')}, but {draft} is at revision {here}; train "
            "a head for it: python train.py model.draft=..."
        )
    return f"{head}: as it was exported{'' if draft is None else f', and for {draft} as it is now'}"


def rewrite_card(head: str) -> str:
    """Write a local head's card anew from its config, which an evaluation may have added to."""
    found, path = load_head(head), Path(head) / "README.md"
    if not path.parent.is_dir():
        raise UserError(f"head={head} is on the hub, and a card is written into a local folder; give one.")
    write_whole(path, lambda temporary: temporary.write_text(card(found.config)))
    return f"{path} written"


def export(head: str, format: str) -> str:
    """Write a local head for another decoder; return where it is."""
    found = load_head(head)
    if format not in FORMATS:
        raise UserError(f"format={format} is not known; use {' or '.join(FORMATS)}.")
    if not Path(head).is_dir():
        raise UserError(f"head={head} is on the hub, and files are written into a local folder; give one.")
    if found.golden_inputs is None:
        raise UserError(
            f"head={head} is a checkpoint of the SpecDec++ authors'; make it a head of this project first: "
            f"python -c \"import specheads; specheads.load_head('{head}').save_pretrained('my-head')\""
        )
    return f"{FORMATS[format].write(found, Path(head))} written"


VERBS = {
    "inspect": Verb("say what a head is: shape, inputs, whose it is, what was measured", HEAD, {}, inspect),
    "verify": Verb(
        "check tensors, shapes and golden vectors of a head",
        HEAD,
        {"draft": "a draft's folder or hub id: is the head for it, as it is?"},
        verify,
    ),
    "export": Verb(
        "write a head for another decoder into its folder",
        HEAD | {"format": "one of:" + "".join(f"\n{'':19}{name:<13} {made.about}" for name, made in FORMATS.items())},
        {},
        export,
    ),
    "card": Verb("write the card (README.md) of a head anew from its config", HEAD, {}, rewrite_card),
}


def help_text(verbs: Sequence[str] = tuple(VERBS)) -> str:
    """Return what the command says of itself, or of some verbs."""
    lines = ["usage: specheads <verb> key=value ...", ""]
    for name in verbs:
        verb = VERBS[name]
        lines.append(f"  {name:<10} {verb.about}")
        lines += [f"    {key + '=':<12} {about}" for key, about in verb.needs.items()]
        lines += [f"    {key + '=':<12} {about} (optional)" for key, about in verb.takes.items()]
    return "\n".join(lines)


def done(words: Sequence[str]) -> str:
    """Do what the words of a command line say; return what to print. Raises UserError for words that do not fit."""
    if not words or {"-h", "--help"} & set(words):
        return help_text([word for word in words if word in VERBS] or list(VERBS))
    name, *rest = words
    if name not in VERBS:
        raise UserError(f"specheads {name}: there is no such verb; use {', '.join(VERBS)}, or --help.")
    verb, given = VERBS[name], {}
    for word in rest:
        key, equals, value = word.partition("=")
        if not equals or key not in verb.needs | verb.takes:
            raise UserError(
                f"specheads {name}: {word!r} is not known; it takes {', '.join(f'{key}=' for key in verb.needs | verb.takes)}."
            )
        given[key] = value
    if missing := [key for key in verb.needs if not given.get(key)]:
        raise UserError(f"specheads {name} needs {missing[0]}=: {verb.needs[missing[0]]}.")
    return verb.run(**given)


def main() -> None:
    """Run the command line of this process; a user's mistake is one message and exit code 2."""
    try:
        print(done(sys.argv[1:]))
    except Exception as error:
        message = user_error(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR) from None


def _prompts(learned: TrainPrompts | None) -> str:
    if learned is None:
        return "it does not name those that it learned from"
    return f"learned from {len(learned.train):,}, calibrated on {len(learned.dev):,}; evaluations do not report on them"


def _listed(values: object) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in dict(values).items()
    )
