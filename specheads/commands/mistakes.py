"""What a user is told when words of a command line do not compose: the closest known spelling, and where all are listed."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import yaml
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from specheads.commands.help import REPRODUCE, choices_of, composed, experiments, keys_of
from specheads.commands.main import PROGRAMS
from specheads.errors import UserError
from specheads.pair.config import config_folder

# What Hydra raises for configs that do not compose.
MISTAKES = HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError
PURPOSES = {REPRODUCE: "repeats", "train": "trains by"}  # of the commands that take experiments
GIVEN = re.compile(r"\+*experiment=(.*)")


def composition_error(error: Exception, command: str, words: Sequence[str]) -> UserError:
    """Return the message for an error of Hydra or OmegaConf that the command line `words` of conf/<command>.yaml raised."""
    ask = f"{PROGRAMS[command]} --help"
    if isinstance(error, yaml.YAMLError | UnicodeDecodeError):
        where = "the folder of --config-dir" if any("config-dir" in word or "searchpath" in word for word in words) else "conf/"
        return UserError(f"a file in {where} is not valid YAML in UTF-8: {' '.join(str(error).split())}.")
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        known = choices_of(command, group)
        return UserError(
            f"{group}={name}: there is no such choice; {_closest(name, known)}use one of {', '.join(known)}, or write "
            f"<folder>/{group}/{name}.yaml and add --config-dir <folder>."
        )
    if isinstance(error, MissingMandatoryValue):
        key = str(error.full_key)
        return UserError(f"{key} has no value, but the command needs one; write {key}=<value> ({ask}={key} says what it is).")
    if isinstance(error, ConfigCompositionException) and isinstance(error.__cause__, OmegaConfBaseException):
        key = str(error.__cause__.full_key)
        word = next((word for word in words if word.lstrip("+~").startswith(f"{key}=")), key)
        close = _closest(key, _known_keys(command, [other for other in words if other != word]))
        return UserError(f"{word}: there is no such key; {close}{ask}=all lists every key, and +{word} adds one.")
    reason = f"\n{error.__cause__}" if isinstance(error, HydraException) and error.__cause__ else ""
    return UserError(f"{error}{reason}")


def _closest(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name that is most like `name`, or nothing if none is like it."""
    close = get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]}? " if close else ""


def _known_keys(command: str, words: Sequence[str]) -> list[str]:
    """Return the keys of a command with those of the words that compose."""
    for overrides in ([word for word in words if "=" in word and not word.startswith("-")], []):
        try:
            return keys_of(composed(command, overrides)[0])
        except (HydraException, OmegaConfBaseException):
            continue  # another word is wrong too
    return []


def null_group(error: Exception, words: list[str]) -> UserError | None:
    """Return the message about a group of configs that is set to null, if that is the mistake."""
    nulls = [word.removesuffix("=null") for word in words if word.endswith("=null")]
    groups = [name for name in nulls if (config_folder() / name).is_dir()]
    if "Config group override" not in str(error) or not groups:
        return None
    return UserError(f"{groups[0]}=null: a group of configs cannot be null; write '~{groups[0]}' to leave it out.")


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
