"""The text of `--help`: every key of a command, its value, and its sentence from the classes of settings.

Keys of a choice, such as those of conf/stopping/heuristic.yaml, are explained by the comments of its file. A word that does not
compose gets the closest known spelling.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import groupby, takewhile
from textwrap import TextWrapper
from typing import Any, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from specheads.commands.compose import RunSettings, command_config, names_of
from specheads.commands.main import PROGRAMS
from specheads.errors import UserError
from specheads.pair.config import PairConfig, config_folder
from specheads.prompts.sources import source_class
from specheads.settings import fields_of

GROUP, REPRODUCE = "experiment", "reproduce"
REPRODUCES = re.compile(rf"^command: {REPRODUCE}/", re.MULTILINE)  # to parse the files would take longer than all else here
MORE = {"--help=all": "explains every key in full", "--help=<key>": "explains the keys of a group"}
HYDRA = {
    "+key=value": "adds a key that is not listed; '~key' takes one away",
    "-m key=a,b": "runs every combination of the values, one after another",
    "--cfg job": "prints the composed config and ends",
    "--hydra-help": "lists the options of Hydra",
}
RUN_FOLDER = ("${hydra:runtime.output_dir}", "${paths.outputs}/${command}/<date_time>")  # the first is known only within a run
WORDS = re.compile(r"(?:'[^']*'|\S)+")  # of a command line
PLAIN = re.compile(r"[^\s\"'{}\[\],]+")  # text that the command line takes without quotes
NARROWEST, USUAL, WIDEST = 60, 100, 130  # columns of a terminal
PURPOSES = {REPRODUCE: "repeats", "train": "trains by"}  # of the commands that take experiments
GIVEN = re.compile(r"\+*experiment=(.*)")
ALL = "all"  # every key
MOST_EXAMPLES = 4  # command lines in the help that fits a screen
Rows = list[tuple[str, str]]  # "key=value", or "key.*" for a group of keys, and its explanation


@dataclass(frozen=True)
class _Section:
    """The keys of one config group, or of none."""

    title: str
    description: str
    rows: Rows = field(default_factory=list)


def help_text(
    command: str, overrides: Sequence[str] = (), width: int | None = None, classes: Sequence[type] = (), of: str = ALL
) -> str:
    """Return the help of conf/<command>.yaml with the values that `overrides` lead to, for a terminal `width` columns wide.

    Args:
        classes: the command's classes of settings.
        of: every key; an empty text for a screen with the keys of the first level; or a key, with those in its group.

    Raises:
        HydraException, OmegaConfBaseException: `overrides` do not compose.
        UserError: no key is called `of`.
    """
    width = max(NARROWEST, width or min(WIDEST, shutil.get_terminal_size((USUAL, 24)).columns))
    cfg, chosen = composed(command, overrides)
    listed = sections(cfg, chosen, classes)
    if of not in (ALL, ""):
        return "\n\n".join(_section_texts(_within(listed, of), width))
    whole, head, examples = of == ALL, _head_of(command), usage_head(command)
    if not whole and len(examples) > MOST_EXAMPLES:
        head = head[: head.index(f"  {examples[MOST_EXAMPLES]}")]
    parts = [f"usage: {PROGRAMS[command]} [key=value ...]", _paragraphs("\n".join(head), width)]
    groups = [(f"{group}=", _choices(command, group, choice)) for group, choice in chosen.items()]
    parts.append("\n".join(["config groups, [what is chosen here]", *_lines(groups, width, single=not whole)]))
    if command == REPRODUCE:
        described = [(name, about.partition("\n")[0]) for name, about in experiments(command).items()]
        parts.append("\n".join(["experiments", *_lines(described, width, single=not whole)]))
    if whole:
        parts += _section_texts(listed, width)
    else:
        rows = [row for section in listed for row in section.rows]
        names = dict.fromkeys(_key(text).partition(".")[0] for text, _ in rows if "." in text.partition("=")[0])
        keys = [row for row in rows if _key(row[0]).partition(".")[0] not in names]
        parts.append("\n".join(["keys", *_lines(keys, width, single=True)]))
        parts.append(_wrap("  ".join(f"{name}.*" for name in names), width, "groups of keys\n  ", "  "))
    more = HYDRA if whole else MORE | HYDRA
    return "\n\n".join([*parts, "\n".join(["Hydra" if whole else "more", *_lines([*more.items()], width)])])


def usage_head(command: str) -> list[str]:
    """Return the command lines that the head of conf/<command>.yaml shows."""
    return [line.strip() for line in _head_of(command) if line.startswith(" ")]


def _head_of(command: str) -> list[str]:
    return read_head((config_folder() / f"{command}.yaml").read_text("utf-8")).splitlines()


def composed(command: str, overrides: Sequence[str] = ()) -> tuple[DictConfig, dict[str, str | None]]:
    """Return a command's config without Hydra's node, and the choice of each config group.

    A key that is swept (`head.depth=0,1`) has many values, so it keeps its default.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    single = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
    content = cast(dict[str, Any], OmegaConf.to_container(command_config(command, single, with_hydra=True)))
    choices: dict[str, str | None] = content.pop("hydra")["runtime"]["choices"]
    for override in parsed:  # Hydra does not report a choice that is a list
        group, names = override.key_or_group, override.value()
        if isinstance(names, list) and (config_folder() / group).is_dir():
            choices[group] = f"[{','.join(map(str, names))}]"
    groups = [group for group in reversed(choices) if group.isidentifier()]  # not hydra/launcher; Hydra has the last one first
    cfg = cast(DictConfig, OmegaConf.create(OmegaConf.to_yaml(content).replace(*RUN_FOLDER)))
    return cfg, {group: choices[group] for group in sorted(groups, key=lambda group: group != "model")}


def sections(cfg: DictConfig, chosen: Mapping[str, str | None], classes: Sequence[type]) -> list[_Section]:
    """Return every key of a composed config with its explanation: first those of no config group, then group by group."""
    explained: dict[str, str] = {}
    listed = {"": _Section("general", "")}
    for group, choice in chosen.items():
        files = {path.stem: path.read_text("utf-8") for path in (config_folder() / group).glob("*.yaml")}
        listed[group] = _Section(f"{group}={choice}", read_head(files.get(str(choice), "")))
        for name in sorted(files, key=_chosen(choice).__contains__):
            explained |= _comments(files[name], group) if group != GROUP else {}
    prefixed = [(RunSettings, ""), (PairConfig, "model"), (source_class(cfg.data), "data"), *((cls, "") for cls in classes)]
    explained |= {each.key: each.help for cls, prefix in prefixed for each in fields_of(cls, prefix) if each.help}
    for key, value in _walk(cast(Mapping[str, Any], OmegaConf.to_container(cfg))):
        section, explanation = listed.get(key.partition(".")[0], listed[""]), explained.get(key, "")
        if not isinstance(value, Mapping) or not value:
            section.rows.append((f"{key}={_shown(_resolved(cfg, key, value))}", explanation))
        elif explanation:
            section.rows.append((f"{key}.*", explanation))
    return list(listed.values())


def experiments(command: str) -> dict[str, str]:
    """Return the files of conf/experiment that a command takes: by name the comment at the head of each.

    They are recipes of training, or experiments of papers, whose runs have folders of their own: `command: reproduce/<name>`.
    """
    files = {path.stem: path.read_text("utf-8") for path in sorted((config_folder() / GROUP).glob("*.yaml"))}
    fitting = {name: text for name, text in files.items() if bool(REPRODUCES.search(text)) == (command == REPRODUCE)}
    return {name: read_head(text) for name, text in fitting.items()}


def read_head(text: str) -> str:
    """Return the comment at the head of a YAML file."""
    head = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in head if not line.startswith("# @package"))


def choices_of(command: str, group: str) -> list[str]:
    """Return the names in a config group that a command takes, of those that the project has."""
    return [*experiments(command)] if group == GROUP else names_of(group)


def _comments(text: str, group: str) -> dict[str, str]:
    """Return by key the comments of a choice's file: each follows its key, or goes on in lines of its own below."""
    package = re.match(r"# @package (\S+)", text)
    path, comments = [package[1] if package else group], {}
    for line in text.splitlines():
        if match := re.match(r"( *)(\w+):[^#]*(?:# (.*))?$", line):
            path[1 + len(match[1]) // 2 :] = [match[2]]
            comments[".".join(path)] = match[3] or ""
        elif (match := re.match(r" +# (.*)", line)) and comments:
            comments[".".join(path)] += f" {match[1]}"
    return comments


def _within(listed: Sequence[_Section], key: str) -> list[_Section]:
    """Return the sections with the key and those in its group. Raises UserError if there are none."""
    rows = {each.title: [row for row in each.rows if f"{_key(row[0])}.".startswith(f"{key}.")] for each in listed}
    if not any(rows.values()):
        raise UserError(f"--help={key}: there is no such key; --help=all lists every key.")
    return [_Section(title, "", kept) for title, kept in rows.items() if kept]


def _key(text: str) -> str:
    """Return the key of a row."""
    return text.partition("=")[0].removesuffix(".*")


def _choices(command: str, group: str, chosen: str | None) -> str:
    """Return the names of a config group, the chosen ones marked and first."""
    known, marked = choices_of(command, group), _chosen(chosen)
    names = [*(() if chosen else ("null",)), *known, *(name for name in marked if name not in ("null", *known))]
    return " | ".join([f"[{name}]" for name in names if name in marked] + [name for name in names if name not in marked])


def _chosen(choice: str | None) -> list[str]:
    """Return the names in a choice: one, several ("[a,b]"), or "null"."""
    return (choice or "null").strip("[]").split(",")


def _walk(content: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every node and leaf that is meant for users, nodes before their children."""
    for name, value in content.items():
        if name != "_target_":
            yield f"{parent}{name}", value
            yield from _walk(value, f"{parent}{name}.") if isinstance(value, Mapping) else ()


def _resolved(cfg: DictConfig, key: str, value: Any) -> Any:
    """Return a value with its interpolations resolved, or as it is where only a run can do that."""
    try:
        return OmegaConf.select(cfg, key) if isinstance(value, str) and "${" in value else value
    except OmegaConfBaseException:
        return value


def _shown(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, str) and PLAIN.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _section_texts(listed: Sequence[_Section], width: int) -> Iterator[str]:
    """Yield the text of each section that has one; explanations start in the same column of all."""
    limit = width // 2 - 4
    column = max(min(len(text), limit) for section in listed for text, _ in section.rows)
    for section in listed:
        if section.rows or section.description:
            title = _wrap(section.description, width, f"{section.title}  ", "  ")
            yield "\n".join([title, *_lines([(_cut(text, limit), why) for text, why in section.rows], width, column)])


def _cut(text: str, limit: int) -> str:
    """Return "key=value" with a long value cut short."""
    limit = max(limit, text.find("=") + 2)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _lines(rows: Rows, width: int, column: int = 0, single: bool = False) -> list[str]:
    """Return rows in two columns, the first at least `column` wide; the second is wrapped, or with `single` cut to the line."""
    rows = [(_cut(text, width // 3), why) for text, why in rows] if single else rows
    column = max([column, *(len(text) for text, _ in rows)])
    if not single:
        return [_wrap(why, width, f"  {text:<{column}}  ", " " * (column + 4)) for text, why in rows]
    lines = [f"  {text:<{column}}  {why}".rstrip() for text, why in rows]
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _paragraphs(text: str, width: int) -> str:
    """Return `text` wrapped; indented lines are command lines, which a backslash continues."""
    blocks = [(is_command, [*lines]) for is_command, lines in groupby(text.splitlines(), key=lambda line: line.startswith(" "))]
    wrapped = [
        [_command_line(line, width) for line in lines] if is_command else [_wrap(" ".join(lines), width)]
        for is_command, lines in blocks
    ]
    return "\n".join(line for block in wrapped for line in block)


def _command_line(line: str, width: int) -> str:
    """Return a command line as lines of at most `width` columns that a shell reads as one; words in quotes stay whole."""
    lines = ["  "]
    for word in WORDS.findall(line):
        if len(lines[-1]) + len(word) + 3 > width and lines[-1].strip():
            lines.append("      ")
        lines[-1] += ("" if lines[-1].isspace() else " ") + word
    return " \\\n".join(lines)


def _wrap(text: str, width: int, first: str = "", indent: str = "") -> str:
    wrapper = TextWrapper(width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text) or first.rstrip()


def composition_error(error: Exception, command: str, words: Sequence[str], composed: bool = False) -> UserError | None:
    """Return the message for an error that the command line `words` of conf/<command>.yaml raised in Hydra, or None.

    `composed`: the config was composed already, so that an error about the text of a file is of no config.
    """
    ask = f"{PROGRAMS[command]} --help"
    nulls = [name for word in words if word.endswith("=null") and (config_folder() / (name := word[:-5])).is_dir()]
    if nulls and "Config group override" in str(error):
        return UserError(f"{nulls[0]}=null: a group of configs cannot be null; write '~{nulls[0]}' to leave it out.")
    if isinstance(error, yaml.YAMLError | UnicodeDecodeError) and not composed:
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
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
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
            cfg = composed(command, overrides)[0]
            return [key for key, _ in _walk(cast(Mapping[str, Any], OmegaConf.to_container(cfg)))]
        except (HydraException, OmegaConfBaseException):
            continue  # another word is wrong too
    return []


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
