"""The verb of `specheads` without a config that sends results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import fill

from specheads.commands.verbs import TOOLS
from specheads.errors import UserError
from specheads.evaluation.pair_result import write_pair_result

COLUMNS = 80  # of help texts


@dataclass(frozen=True)
class Verb:
    """One verb of the command: its required and optional keys, a sentence of help for each, and its function."""

    required: dict[str, str]
    optional: dict[str, str]
    run: Callable[..., str]


VERBS = {
    "result": Verb({"report": "the folder of a run of specheads evaluate"}, {}, write_pair_result),
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
