"""The text of `--help`: every key of a command, its value, and its sentence from the classes of
settings or choices' files. What the last word of a command line may become, for Tab. And messages
for what Hydra cannot compose.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import takewhile
from typing import cast

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table

from specheads.commands.compose import command_config, keys_of, names_of
from specheads.commands.verbs import PROGRAMS, VERBS, closest
from specheads.errors import UserError
from specheads.prompts.sources import DatasetSource, NanoSource, source_class
from specheads.settings import config_folder, fields_of, shown

GROUP = "experiment"
_HYDRA = [
    ("+key=value", "adds a key that is not listed; '~key' takes one away"),
    ("-m key=a,b", "runs every combination of the values, one after another"),
    ("--cfg job", "prints the composed config and ends"),
    ("--hydra-help", "lists the options of Hydra"),
]
_MORE = [
    ("--help=all", "explains every key in full"),
    ("--help=<key>", "explains the keys of a group"),
    *_HYDRA,
]
_ALL = "all"  # every key
_MOST_EXAMPLES = 4  # command lines in the help that fits a screen
# The help that fits a screen explains those of these keys that a command has, and only names the
# others.
_FIRST = (
    "head",
    "heads",
    "head.depth",
    "samples",
    "prompts",
    "num_prompts",
    "num_dev_prompts",
    "data.num_train",
    "trainer.max_epochs",
    "optimizer.lr",
    "loader.batch_size",
    "warp.temperature",
    "data.max_new_tokens",
    "split",
    "ratios",
    "num_live_prompts",
    "concurrency",
    "repeats",
    "serving",
    "runner",
    "generation.batch_size",
    "paths.outputs",
    "resume",
)
_MOST_KEYS = 10


@dataclass(frozen=True)
class Section:
    """Rows of the help: "key=value", or "key.*" for a group of keys, and its explanation."""

    title: str
    description: str = ""
    rows: list[tuple[str, str]] = field(default_factory=list)


def help_text(
    command: str, overrides: Sequence[str] = (), width: int | None = None, of: str = _ALL
) -> str:
    """Return the help of conf/<command>.yaml with the values that `overrides` lead to, for a
    terminal `width` columns wide.

    `of` is a key, with those in its group, or "all"; an empty text is for a screen with the keys
    that matter first. Raises UserError for an unknown key, and Hydra's errors for `overrides` that
    do not compose.
    """
    cfg, chosen = composed(command, overrides)
    output = StringIO()
    console = Console(file=output, width=width, markup=False, emoji=False, highlight=False)
    listed = sections(cfg, chosen, command)
    is_short = not of
    if is_short or of == _ALL:
        about = [line for line in _head_of(command) if not line.startswith(" ")]
        console.print(f"usage: {PROGRAMS[command]} [key=value ...]", "", *about, sep="\n")
        for line in usage_head(command)[: _MOST_EXAMPLES if is_short else None]:
            console.print(f"  {line}", soft_wrap=True)  # a command line stays whole for copying
        console.print()
        if is_short:
            first, others = _most_used(listed)
            listed = [first, _choices(chosen), others, Section("more", "", _MORE)]
        else:
            listed = [_choices(chosen), *listed, Section("Hydra", "", _HYDRA)]
    else:
        listed = _only(listed, of)
    for section in listed:
        if section.rows or section.description:
            console.print(section.title)
            if section.description:
                console.print(Padding(section.description, (0, 0, 0, 2)))
            if section.rows:
                console.print(_table(section.rows, console.width, is_short))
            console.print()
    return "\n".join(line.rstrip() for line in output.getvalue().rstrip().splitlines())


def _only(listed: Sequence[Section], of: str) -> list[Section]:
    """Return the sections with the rows of a key, and of those in its group, alone."""
    kept = []
    for section in listed:
        rows = [row for row in section.rows if row[0].startswith((f"{of}.", f"{of}="))]
        if rows:
            kept.append(Section(section.title, "", rows))
    if not kept:
        raise UserError(f"--help={of}: there is no such key; --help=all lists every key.")
    return kept


def _choices(chosen: Mapping[str, str | None]) -> Section:
    """Return the config groups with what may be chosen in each."""
    section = Section("config groups, [what is chosen here]")
    for group, choice in chosen.items():
        marked = _names_in(choice)
        others = [name for name in names_of(group) if name not in marked]
        names = [*(f"[{name}]" for name in marked), *others]
        section.rows.append((f"{group}=", " | ".join(names)))
    return section


def _most_used(listed: Sequence[Section]) -> tuple[Section, Section]:
    """Return the first ten keys of `_FIRST` that a command has, and the names of its other keys,
    and groups of keys.
    """
    rows = {}
    for section in listed:
        for row in section.rows:
            rows[row[0].partition("=")[0]] = row
    first = [key for key in _FIRST if key in rows][:_MOST_KEYS]
    others: list[str] = []
    groups: list[str] = []
    for key in rows:
        group = f"{key.partition('.')[0]}.*"
        if "." not in key and key not in first:
            others.append(key)
        elif "." in key and group not in groups:
            groups.append(group)
    return (
        Section("keys that matter first", "", [rows[key] for key in first]),
        Section("other keys, and groups of keys", "  ".join([*others, *groups])),
    )


def _table(rows: list[tuple[str, str]], width: int, is_short: bool) -> Table:
    """Return rows in two columns; with `is_short` each is cut to a line.

    A value may be cut, but not a key.
    """
    limit = max(width // (3 if is_short else 2), *(text.find("=") + 4 for text, _ in rows))
    longest = max(len(text) + 2 for text, _ in rows)
    first = Column(no_wrap=True, overflow="ellipsis", width=min(limit, longest))
    second = Column(no_wrap=is_short, overflow="ellipsis", ratio=1)
    table = Table.grid(first, second, padding=(0, 2), expand=True)
    for text, explanation in rows:
        table.add_row(f"  {text}", explanation)
    return table


def usage_head(command: str) -> list[str]:
    """Return the command lines that the head of conf/<command>.yaml shows."""
    return [line.strip() for line in _head_of(command) if line.startswith(" ")]


def _head_of(command: str) -> list[str]:
    return read_head((config_folder() / f"{command}.yaml").read_text("utf-8")).splitlines()


def composed(
    command: str, overrides: Sequence[str] = ()
) -> tuple[DictConfig, dict[str, str | None]]:
    """Return a command's config without Hydra's node, and the choice of each group.

    A swept key (`a=0,1`) keeps its default.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    single = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
    cfg = command_config(command, single, with_hydra=True)
    choices: dict[str, str | None] = {}
    for group, choice in reversed(cfg.hydra.runtime.choices.items()):  # it has the last one first
        if group.isidentifier():  # not hydra/launcher
            choices[group] = choice
    for override in parsed:  # Hydra does not report a choice that is a list
        names = override.value()
        if isinstance(names, list) and names_of(override.key_or_group):
            choices[override.key_or_group] = shown(names)
    OmegaConf.set_struct(cfg, False)
    del cfg.hydra
    cfg.paths.run = "${paths.outputs}/${command}/<date_time>"  # only a run knows the folder
    model_first = sorted(choices, key=lambda group: group != "model")
    return cfg, {group: choices[group] for group in model_first}


def sections(cfg: DictConfig, chosen: Mapping[str, str | None], command: str) -> list[Section]:
    """Return every key of a composed config with its explanation: first those of no config group,
    then group by group.
    """
    explained: dict[str, str] = {}
    listed = {"": Section("general")}
    for group, choice in chosen.items():
        files = _texts_of(group)
        listed[group] = Section(f"{group}={choice}", read_head(files.get(str(choice), "")))
        if group != GROUP:
            for name in sorted(files, key=_names_in(choice).__contains__):
                explained |= _comments(files[name], group)
    explained |= _sentences(command, source_class(cfg.data))
    content = cast(dict[str, object], OmegaConf.to_container(cfg, resolve=True))
    for key, value in _walk(content):
        rows = listed.get(key.partition(".")[0], listed[""]).rows
        explanation = explained.get(key, "")
        if not isinstance(value, Mapping) or not value:
            rows.append((f"{key}={shown(value)}".replace("\n", "\\n"), explanation))
        elif explanation:
            rows.append((f"{key}.*", explanation))
    return list(listed.values())


def _sentences(command: str, *sources: type) -> dict[str, str]:
    """Return the keys of a command and of sources of prompts, and their sentences of help."""
    sentences = {}
    for cls in sources:
        for key, text in fields_of(cls, "data").items():
            if text:
                sentences[key] = text
    return sentences | keys_of(command).sentences


def _texts_of(group: str) -> dict[str, str]:
    """Return the texts of the files of a config group by their names."""
    texts = {}
    for path in sorted((config_folder() / group).glob("*.yaml")):
        texts[path.stem] = path.read_text("utf-8")
    return texts


def read_head(text: str) -> str:
    """Return the comment at the head of a YAML file."""
    lines = []
    for line in takewhile(lambda line: line.startswith("#"), text.splitlines()):
        if not line.startswith("# @package"):
            lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)


def _comments(text: str, group: str) -> dict[str, str]:
    """Return by key the comments of a choice's file: each follows its key, or continues in the
    comment lines below.
    """
    package = re.match(r"# @package (\S+)", text)
    path = [package[1] if package else group]
    comments: dict[str, str] = {}
    key = ""
    for line in text.splitlines():
        if match := re.match(r"( *)(\w+):[^#]*(?:# (.*))?$", line):
            path[1 + len(match[1]) // 2 :] = [match[2]]
            key = ".".join(path)
            comments[key] = match[3] or ""
        elif (match := re.match(r" +# (.*)", line)) and key:
            comments[key] += f" {match[1]}"
    return comments


def _names_in(choice: str | None) -> list[str]:
    """Return the names in a choice: one, several ("[a,b]"), or "null"."""
    return (choice or "null").strip("[]").split(",")


def _walk(content: Mapping[str, object], parent: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) of every node and leaf that is meant for users, nodes before their
    children.
    """
    for name, value in content.items():
        if name != "_target_":
            yield f"{parent}{name}", value
            if isinstance(value, Mapping):
                yield from _walk(value, f"{parent}{name}.")


def composition_error(error: Exception, command: str, words: Sequence[str]) -> UserError | None:
    """Return the message for an error that the command line `words` of conf/<command>.yaml raised
    in Hydra, or None.
    """
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        return UserError(_no_such_choice(str(error.missing_cfg_file)))
    if isinstance(error, MissingMandatoryValue):
        key = str(error.full_key)
        return UserError(
            f"{key} has no value, but the command needs one; write {key}=<value>"
            f" ({PROGRAMS[command]} --help={key} says what it is)."
        )
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        quoted = shlex.quote(f'{key}="{value}"')
        return UserError(
            f"{error.override}: this cannot be read ({str(error).splitlines()[0]}); write key=value"
            " with each bracket and quote closed; a text with signs such as = and { needs quotes of"
            f" its own within those of the shell, as in {quoted}."
        )
    if "Config group override" in str(error):
        for word in words:
            group = word.removesuffix("=null")
            if group != word and (config_folder() / group).is_dir():
                return UserError(
                    f"{word}: a group of configs cannot be null; write '~{group}' to leave it out."
                )
    if isinstance(error, ConfigCompositionException):
        message = _wrong_override(error, command, words)
        if message is not None:
            return UserError(message)
    if not HydraConfig.initialized():
        message = _wrong_file(error, words)
        if message is not None:
            return UserError(message)
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    has_cause = isinstance(error, HydraException) and error.__cause__
    return UserError(f"{error}\n{error.__cause__}" if has_cause else str(error))


def _no_such_choice(place: str) -> str:
    group, _, name = place.rpartition("/")
    known = names_of(group)
    return (
        f"{group}={name}: there is no such choice; {closest(name, known)}use one of"
        f" {', '.join(known)}, or write <folder>/{group}/{name}.yaml and add --config-dir <folder>."
    )


def _wrong_override(
    error: ConfigCompositionException, command: str, words: Sequence[str]
) -> str | None:
    text = str(error)
    if text.startswith("Multiple values for "):
        key = text.split()[3].rstrip(".")
        return (
            f"+{key}=: a plus adds what is not listed, and {key} is listed; write {key}=<name>"
            " without it."
        )
    if not isinstance(error.__cause__, OmegaConfBaseException):
        return None
    key = str(error.__cause__.full_key)
    given = re.compile(rf"[+~]*{re.escape(key)}[.=]")
    word = next((word for word in words if given.match(word)), key)
    known = list(_sentences(command, DatasetSource, NanoSource))
    adds = f", and +{word} adds one" if key.startswith(("trainer", "logger")) else ""
    return (
        f"{word}: there is no such key; {closest(word.partition('=')[0], known)}"
        f"{PROGRAMS[command]} --help=all lists every key{adds}."
    )


def _wrong_file(error: Exception, words: Sequence[str]) -> str | None:
    is_users = any("config-dir" in word or "searchpath" in word for word in words)
    where = "a file in the folder of --config-dir" if is_users else "a file in conf/"
    if isinstance(error, yaml.YAMLError | UnicodeDecodeError):
        return f"{where} is not valid YAML in UTF-8: {' '.join(str(error).split())}."
    if str(error).startswith("Invalid defaults list in "):  # a ValueError of Hydra's
        return f"{where} has a mistake: {error}; correct the list, or leave the key out."
    return None


def completions(line: str, word: str) -> list[str]:
    """Return what the last word of a command line may become, each from where the shell's `word`, a
    part of it, begins.
    """
    *before, last = line.split(" ")[1:]
    known: list[str] = []
    if not before:
        known = [f"{name} " for name in VERBS]
    elif before[0] in VERBS:
        config = VERBS[before[0]].config
        known = _words_of(config) if config else []
    start = len(last) - len(word)
    return sorted({each[start:] for each in known if each.startswith(last)})


def _words_of(command: str) -> list[str]:
    """Return the choices and the keys of a command as they begin on its command line."""
    cfg, chosen = composed(command)
    words = []
    for group in chosen:
        words += [f"{group}={name}" for name in names_of(group)]
    for section in sections(cfg, chosen, command):
        for row in section.rows:
            key, equals, _ = row[0].partition("=")
            if equals:
                words.append(f"{key}=")
    return words
