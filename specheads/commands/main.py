"""The `specheads` command: its verbs, and what runs each of them. Only the module of the given verb is imported.

This imports nothing large, so that `specheads --help` answers at once.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata
from typing import Any, NamedTuple

from specheads.errors import UserError, user_error

EXIT_USER_ERROR = 2
# Lightning starts the other processes of a distributed run by the name of the script and Hydra's words, without the verb.
VERB_OF_PARENT = "SPECHEADS_VERB"


class Verb(NamedTuple):
    """A verb: its module and the function there that runs the words of the command line, what it does, its configs in conf/."""

    module: str
    entry: str
    about: str
    configs: tuple[str, ...]

    def load(self) -> Any:
        """Return the function that runs the words of the command line."""
        return getattr(import_module(f"specheads.commands.{self.module}"), self.entry)


VERBS = {
    "probe": Verb("evaluate", "probe_command", "say what speculation is worth for a pair, without training", ("probe",)),
    "data": Verb("data", "main", "have the target answer prompts, and label drafted tokens", ("data_gen",)),
    "train": Verb("train", "main", "train acceptance heads; missing data is made first", ("train",)),
    "distill": Verb("train", "distill_command", "train the draft itself", ("distill",)),
    "evaluate": Verb("evaluate", "main", "compare stopping rules on prompts, decode the best, report", ("evaluate",)),
    "papers": Verb("papers", "main", "repeat papers' experiments and theory, find layers to skip", ("reproduce", "layer_search")),
    "export": Verb("export", "main", "check and describe a head, write it for other decoders", ()),
}
# The command of each config.
PROGRAMS = {
    config: f"specheads {name}{f' {config}' if len(verb.configs) > 1 else ''}"
    for name, verb in VERBS.items()
    for config in verb.configs
}


def _help_text() -> str:
    """Return the help text of the command."""
    lines = [f"  {name:<10} {verb.about}" for name, verb in VERBS.items()]
    return "\n".join(["usage: specheads <verb> [key=value ...]; <verb> --help lists the keys of a verb", "", *lines])


def run(words: Sequence[str]) -> None:
    """Run a command line. Raises UserError for a verb or an argument that is not known."""
    if not words or words[0] in ("-h", "--help"):
        print(_help_text())
        return
    verb, *rest = words
    if verb not in VERBS:
        raise UserError(f"specheads {verb}: there is no such verb; use {', '.join(VERBS)}, or --help.")
    os.environ[VERB_OF_PARENT] = verb
    start(verb, rest)


def start(verb: str, words: Sequence[str]) -> None:
    """Run a verb."""
    sys.argv[1:] = words
    VERBS[verb].load()()


def _notes_on_versions() -> Iterator[str]:
    """Yield a sentence for every installed package of a version that this project does not allow."""
    from packaging.requirements import Requirement  # needed only after a failure

    try:
        listed = [Requirement(line) for line in metadata.requires("specheads") or ()]
    except metadata.PackageNotFoundError:  # of a source tree that is not installed
        return
    for requirement in listed:
        if requirement.marker is None:  # the others belong to extras
            version = metadata.version(requirement.name)
            if not requirement.specifier.contains(version, prereleases=True):
                yield f"{requirement.name} {version} is installed, but specheads needs {requirement}: pip install '{requirement}'"


def main() -> None:
    """Run the command line of this process; a user's mistake is one message and exit code 2.

    Any other error keeps its traceback, with a note on packages that are too old or too new.
    """
    words, verb = sys.argv[1:], os.environ.get(VERB_OF_PARENT)
    if "LOCAL_RANK" in os.environ and verb in VERBS:
        start(verb, words)
        return
    try:
        run(words)
        sys.stdout.flush()
    except BrokenPipeError:  # what reads the output has seen enough: `specheads train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        message = user_error(error)
        if message is None:
            for note in _notes_on_versions():
                error.add_note(note)
            raise
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR) from None
