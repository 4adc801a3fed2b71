"""The text of `--help`: every key of a command, its value, and its sentence from the classes of
settings or choices' files. And messages for what Hydra cannot compose.
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
from specheads.commands.verbs import PROGRAMS
from specheads.errors import UserError, closest
from specheads.prompts.sources import DatasetSource, NanoSource, source_class
from specheads.settings import config_folder, fields_of, shown

GROUP = "experiment"
_MORE = [
    ("--help=all", "explains every key in full"),
    ("--help=<key>", "explains the keys of a group"),
    ("+key=value", "adds a key that is not listed; '~key' takes one away"),
    ("--plan", "prints prompts, tokens, time, memory and disk, and ends"),
    ("-m key=a,b", "runs every combination of the values, one after another"),
    ("--cfg job", "prints the composed config and ends"),
    ("--hydra-help", "lists the options of Hydra"),
]
_ALL = "all"  # every key


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

    `of` is a key, with those in its group, or "all"; an empty text is for a screen that only names
    groups. Raises UserError for an unknown key, and Hydra's errors for `overrides` that
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
        for line in usage_head(command):
            console.print(f"  {line}", soft_wrap=True)  # a command line stays whole for copying
        console.print()
        shown_keys = _shortened(listed) if is_short else listed
        listed = [_choices(chosen), *shown_keys, Section("more", "", _MORE)]
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


def _shortened(listed: Sequence[Section]) -> list[Section]:
    """Return the keys of no group, and the names of the groups."""
    alone = []
    groups = dict[str, None]()
    for section in listed:
        for row in section.rows:
            group, dot, _ = row[0].partition("=")[0].partition(".")
            if dot:
                groups[f"{group}.*"] = None
            else:
                alone.append(row)
    return [Section("keys", "", alone), Section("groups of keys", "  ".join(groups))]


def _table(rows: list[tuple[str, str]], width: int, is_short: bool) -> Table:
    """Return rows in two columns. A value may be cut, but neither a key nor an explanation."""
    limit = max(width // (3 if is_short else 2), *(text.find("=") + 4 for text, _ in rows))
    longest = max(len(text) + 2 for text, _ in rows)
    first = Column(no_wrap=True, overflow="ellipsis", width=min(limit, longest))
    second = Column(ratio=1)
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
    text = str(error)
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        known = names_of(group)
        text = (
            f"{group}={name}: there is no such choice; {closest(name, known)}use one of"
            f" {', '.join(known)}, or write <folder>/{group}/{name}.yaml and add --config-dir"
            " <folder>."
        )
    elif isinstance(error, MissingMandatoryValue):
        key = str(error.full_key)
        text = (
            f"{key} has no value, but the command needs one; write {key}=<value>"
            f" ({PROGRAMS[command]} --help={key} says what it is)."
        )
    elif isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        quoted = shlex.quote(f'{key}="{value}"')
        text = (
            f"{error.override}: this cannot be read ({text.splitlines()[0]}); write key=value with"
            " each bracket and quote closed; a text with signs such as = and { needs quotes of its"
            f" own within those of the shell, as in {quoted}."
        )
    elif isinstance(error, ConfigCompositionException) and isinstance(
        cause, OmegaConfBaseException
    ):
        key = str(cause.full_key)
        given = re.compile(rf"[+~]*{re.escape(key)}[.=]")
        word = next((word for word in words if given.match(word)), key)
        if key in fields_of(DatasetSource, "data"):
            return UserError(
                f"{word}: the chosen data set reads no file; add data=alpaca, for files with the"
                " field instruction (for other fields: data.template=)."
            )
        known = list(_sentences(command, DatasetSource, NanoSource))
        known += {each.partition(".")[0]: None for each in known}  # and their groups
        text = (
            f"{word}: there is no such key; {closest(word.partition('=')[0], known)}"
            f"{PROGRAMS[command]} --help=all lists every key, and +key=value adds one."
        )
    elif "Config group override" in text:
        text = f"{text}; a group of configs is left out by '~group', as in '~logger'."
    elif isinstance(error, HydraException):
        text = f"{text}\n{cause}" if cause else text
    elif not HydraConfig.initialized() and (
        isinstance(error, yaml.YAMLError | UnicodeDecodeError)
        or text.startswith("Invalid defaults list in ")  # a ValueError of Hydra's
    ):
        text = f"a file in conf/ or in the folder of --config-dir: {' '.join(text.split())}"
    elif not isinstance(error, OmegaConfBaseException):
        return None
    return UserError(text)
