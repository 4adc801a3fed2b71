"""The `specheads` command: hands a command line to the function of its verb.

It imports nothing large, so that `--help` answers at once.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from specheads import __version__
from specheads.commands.verbs import VERBS, Verb
from specheads.errors import EXIT_USER_ERROR, UserError, closest, user_error

# Lightning starts the other processes of a distributed run by the name of the script and Hydra's
# words, without the verb.
VERB_OF_PARENT = "SPECHEADS_VERB"
# What checks more of a config than its keys, with the libraries of its strategies.
_CHECKS = {
    "evaluate": "specheads.commands.evaluate.check_strategies",
    "generate": "specheads.commands.generate.check_strategies",
}
_FUNCTIONS = {  # what runs each verb, imported when it runs
    "probe": "specheads.commands.evaluate.probe_pair",
    "data": "specheads.commands.data.make_data",
    "train": "specheads.commands.train.train_head",
    "distill": "specheads.commands.train.distill_draft",
    "evaluate": "specheads.commands.evaluate.evaluate_rules",
    "generate": "specheads.commands.generate.generate",
    "runs": "specheads.commands.runs.main",
    "export": "specheads.commands.export.main",
}


def function_of(verb: Verb) -> Callable[..., object]:
    """Return what runs a verb: a function of its config, or of this process's words without one."""
    return _imported(_FUNCTIONS[verb.name])


def _imported(place: str) -> Callable[..., object]:
    module, _, name = place.rpartition(".")
    return getattr(import_module(module), name)


def run(words: Sequence[str]) -> None:
    """Run a command line. Raises UserError for a verb or an argument that is not known."""
    first = words[0] if words else "--help"
    if first in VERBS:
        os.environ[VERB_OF_PARENT] = first
        sys.argv[1:] = words[1:]
        _run_verb(VERBS[first])
    elif first == "--version":
        print(f"specheads {__version__}")
    elif not words or words[-1] in ("-h", "--help"):
        print("usage: specheads <verb> [key=value ...]; <verb> --help lists the keys of a verb\n")
        for verb in VERBS.values():
            print(f"  {verb.name:<9} {verb.about}")
        print("\n--version prints the version.")
    else:
        raise UserError(
            f"specheads {first}: there is no such verb; {closest(first, list(VERBS))}use"
            f" {', '.join(VERBS)}, or --help."
        )


def _run_verb(verb: Verb) -> None:
    if verb.config is None:
        function_of(verb)()
        return
    from specheads.commands.command import CommandLine

    def check(cfg: object) -> None:
        if place := _CHECKS.get(verb.name):
            _imported(place)(cfg)

    CommandLine(verb, check, lambda: function_of(verb)).run()


def main(verb: str | None = None) -> None:
    """Run the command line of this process, that of `verb` in a script for one verb.

    A user's mistake is one message and exit code 2.
    """
    words = sys.argv[1:]
    of_parent = os.environ.get(VERB_OF_PARENT)
    if verb is None and "LOCAL_RANK" in os.environ and of_parent in VERBS:
        verb = of_parent
    try:
        run([verb, *words] if verb else words)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough: `specheads train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        message = user_error(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR) from None
