"""The files of conf/experiment, each for its commands: recipes of training, and experiments of papers.

The latter have a run folder of their experiment: `command: reproduce/<name>`.
"""

import re
from collections.abc import Sequence

from specheads.commands.yaml_comments import read_head
from specheads.errors import UserError
from specheads.pair_config import config_folder

REPRODUCE = "reproduce"
PURPOSES = {REPRODUCE: "repeats", "train": "trains by"}  # of the commands that take experiments
GROUP = "experiment"
REPRODUCES = re.compile(rf"^command: {REPRODUCE}/", re.MULTILINE)  # to parse the files would take longer than all else here
GIVEN = re.compile(r"\+*experiment=(.*)")


def experiments(command: str) -> dict[str, str]:
    """Return the experiments that a command takes: by name the comment at the head of each file."""
    files = {path.stem: path.read_text("utf-8") for path in sorted((config_folder() / "experiment").glob("*.yaml"))}
    fitting = {name: text for name, text in files.items() if bool(REPRODUCES.search(text)) == (command == REPRODUCE)}
    return {name: read_head(text) for name, text in fitting.items()}


def check_experiment(command: str, words: Sequence[str]) -> None:
    """Raise UserError if an experiment in the words of a command line is for other commands, or if one is missing."""
    given = [name for word in words if (match := GIVEN.fullmatch(word)) for name in match[1].split(",")]
    if command not in PURPOSES or not (given or command == REPRODUCE):
        return
    names, purpose = experiments(command), PURPOSES[command]
    listed = f"use one of {', '.join(names)}."
    if command == REPRODUCE and not given:
        raise UserError(f"experiment is missing; it names what {command} {purpose}: {listed}")
    for name in given:
        other = REPRODUCE if name in experiments(REPRODUCE) else "train"
        elsewhere = name not in names and name in experiments(other)  # what is in no list may be in a folder of the user
        if elsewhere or (name == "null" and command == REPRODUCE):
            raise UserError(
                f"experiment={name} is not what {command} {purpose}{f'; {other} takes it' if elsewhere else ''}; {listed}"
            )
