"""The `specheads` command: its verbs, and what runs each.

It imports nothing large, so that `--help` answers at once.
"""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

from specheads import __version__
from specheads.errors import UserError, user_error

EXIT_USER_ERROR = 2
# Lightning starts the other processes of a distributed run by the name of the script and Hydra's
# words, without the verb.
VERB_OF_PARENT = "SPECHEADS_VERB"


class Verb(NamedTuple):
    """A verb: its module and the function there that runs the words of the command line, what it
    does, its config in conf/.
    """

    module: str
    entry: str
    about: str
    config: str | None

    def load(self) -> Any:
        """Return the function that runs the words of the command line."""
        return getattr(import_module(f"specheads.commands.{self.module}"), self.entry)


VERBS = {
    "probe": Verb(
        "evaluate",
        "probe_pair",
        "say what speculation is worth for a pair, without training",
        "probe",
    ),
    "data": Verb(
        "data", "main", "have the target answer prompts, and label drafted tokens", "data_gen"
    ),
    "train": Verb(
        "train", "train_head", "train acceptance heads; missing data is made first", "train"
    ),
    "distill": Verb("train", "distill_draft", "train the draft itself", "distill"),
    "evaluate": Verb(
        "evaluate", "main", "compare stopping rules on prompts, decode the best, report", "evaluate"
    ),
    "runs": Verb("runs", "main", "list runs and heads, with key figures; takes outputs=", None),
    "export": Verb(
        "export", "main", "check and describe a head, write it for other decoders", None
    ),
}
COMPLETE = (  # with names of files where nothing fits
    "complete -o default -o nospace -C 'specheads --complete' specheads"
)
PROGRAMS = {
    verb.config: f"specheads {name}" for name, verb in VERBS.items() if verb.config
}  # the command of each config


def run(words: Sequence[str]) -> None:
    """Run a command line. Raises UserError for a verb or an argument that is not known."""
    if [*words] == ["--version"]:
        print(f"specheads {__version__}")
        return
    if words[:1] == ["--complete"]:
        line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
        print("\n".join(import_module("specheads.commands.help").completions(line, words[2])))
        return
    for name, verb in VERBS.items():
        if [*words][: (size := len(name.split()))] == name.split():
            os.environ[VERB_OF_PARENT] = name
            sys.argv[1:] = words[size:]
            if verb.config is None:
                verb.load()()
            else:
                import_module("specheads.commands.command").CommandLine(verb.config).run()
            return
    if words and words[-1] not in ("-h", "--help"):
        given = " ".join(word for word in words[:2] if "=" not in word)
        likely = closest(given, list(VERBS)) or closest(words[0], list(VERBS))
        raise UserError(
            f"specheads {given}: there is no such verb; {likely}use {', '.join(VERBS)}, or --help."
        )
    print("usage: specheads <verb> [key=value ...]; <verb> --help lists the keys of a verb\n")
    print("\n".join(f"  {name:<19} {verb.about}" for name, verb in VERBS.items()))
    print(f"\n--version prints the version. For completion by Tab, in bash:\n  {COMPLETE}")


def arguments(verb: str, words: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Return the values of `key=value` words by their keys.

    Raises UserError for another word, or a key that is not known.
    """
    for word in words:
        if "=" not in word or word.partition("=")[0] not in known:
            raise UserError(
                f"specheads {verb}: {word!r} is not known; it takes {'=, '.join(known)}=."
            )
    return dict(word.split("=", 1) for word in words)


def closest(name: str, known: Sequence[str]) -> str:
    """Return a question with the known names that end or begin as `name`, or else the one most like
    it; "" if none is.
    """
    ends = [each for each in known if each.endswith(f".{name}")] or [
        each for each in known if each.startswith(name)
    ]
    close = ends[:3] or get_close_matches(name, known, 1)
    return f"did you mean {' or '.join(close)}? " if close and name else ""


def main() -> None:
    """Run the command line of this process; a user's mistake is one message and exit code 2."""
    words = sys.argv[1:]
    parents = os.environ.get(VERB_OF_PARENT)
    try:
        run(
            [*parents.split(), *words] if "LOCAL_RANK" in os.environ and parents in VERBS else words
        )
        sys.stdout.flush()
    except (
        BrokenPipeError
    ):  # what reads the output has seen enough: `specheads train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        message = user_error(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR) from None
