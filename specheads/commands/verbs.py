"""The verbs of `specheads`: a sentence about each, and where it is.

This imports nothing, so that `specheads --help` answers at once.
"""

from typing import NamedTuple


class Configured(NamedTuple):
    """A verb with a config: its module, whose `main` runs the command line, its sentence of help, and the words it stands for."""

    module: str
    about: str
    words: tuple[str, ...] = ()


COMMANDS = "specheads.commands"
CONFIGURED = {
    "probe": Configured(f"{COMMANDS}.probe", "say what speculation is worth for a pair, without training"),
    "data": Configured(f"{COMMANDS}.data", "have the target answer prompts, and label drafted tokens"),
    "train": Configured(f"{COMMANDS}.train", "train acceptance heads; missing data is made first"),
    "distill": Configured(f"{COMMANDS}.train", "train the draft itself", ("task=distill",)),
    "evaluate": Configured(f"{COMMANDS}.evaluate", "compare stopping rules on prompts, decode the best, report"),
    "papers": Configured(f"{COMMANDS}.papers", "repeat experiments of papers, compute their theory, search layers to skip"),
}

# Those without a config.
TOOLS = {
    "export": "check and describe a head, write it for other decoders",
}
