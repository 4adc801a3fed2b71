"""The verbs of `specheads`: what each does, its config in conf/, and the settings behind its keys.

It imports nothing large, so that `specheads --help` answers at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from specheads.errors import UserError, closest

if TYPE_CHECKING:
    from specheads.settings import Settings

_DATA = "specheads.data_gen.settings.DataGeneration"


@dataclass(frozen=True)
class Verb:
    """A verb of the command line; one without a config in conf/ takes a few `key=value` words."""

    name: str
    about: str
    config: str | None = None
    classes: tuple[str, ...] = ()  # where the classes are whose fields are the keys of the config
    outputs: str | None = None  # the folder of its runs in paths.outputs, if not named as config
    has_run: bool = True  # whether it writes into the folder of a run

    def settings(self) -> "list[type[Settings]]":
        """Return the classes of settings whose fields are its keys; their imports take seconds."""
        found = []
        for place in self.classes:
            module, _, name = place.rpartition(".")
            found.append(getattr(import_module(module), name))
        return found


_LISTED = (
    Verb(
        "probe",
        "say what speculation is worth for a pair, without training",
        "probe",
        (_DATA, "specheads.evaluation.probe.settings.Probe"),
    ),
    Verb(
        "data",
        "have the target answer prompts, and label drafted tokens",
        "data_gen",
        (_DATA, "specheads.data_gen.settings.OwnPrompts"),
    ),
    Verb(
        "train",
        "train acceptance heads; missing data is made first",
        "train",
        (_DATA, "specheads.training.heads.settings.HeadTraining"),
        outputs="head",
    ),
    Verb(
        "distill",
        "train the draft itself",
        "distill",
        (_DATA, "specheads.training.distill.settings.Distillation"),
    ),
    Verb(
        "evaluate",
        "compare stopping rules on prompts, decode the best, report",
        "evaluate",
        (_DATA, "specheads.evaluation.keys.EvaluationKeys"),
    ),
    Verb(
        "generate",
        "answer a prompt, or chat in the terminal",
        "generate",
        ("specheads.decoding.keys.GenerationKeys",),
        has_run=False,
    ),
    Verb("runs", "list runs and heads, with key figures; takes outputs="),
    Verb("export", "check and describe a head, write it for other decoders"),
)
VERBS = {verb.name: verb for verb in _LISTED}
PROGRAMS = {verb.config: f"specheads {verb.name}" for verb in _LISTED if verb.config}


def verb_of(config: str) -> Verb:
    """Return the verb whose config is conf/<config>.yaml."""
    return next(verb for verb in _LISTED if verb.config == config)


def arguments(verb: str, words: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Return the values of `key=value` words by their keys.

    Raises UserError for another word, or a key that is not known.
    """
    values = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            raise UserError(
                f"specheads {verb}: {word!r} is not known; {closest(key, known)}it takes"
                f" {'=, '.join(known)}=."
            )
        values[key] = value
    return values
