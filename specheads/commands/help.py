"""The text of `--help`: every key of a command, its value, and its sentence from the classes of
settings or choices' files.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from itertools import takewhile
from typing import Any, NamedTuple, cast

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
from specheads.commands.main import PROGRAMS, VERBS, closest
from specheads.errors import UserError
from specheads.prompts.sources import DatasetSource, NanoSource, source_class
from specheads.settings import config_folder, fields_of, shown

GROUP = "experiment"
_MORE = [
    ("--help=all", "explains every key in full"),
    ("--help=<key>", "explains the keys of a group"),
]
_HYDRA = [
    ("+key=value", "adds a key that is not listed; '~key' takes one away"),
    ("-m key=a,b", "runs every combination of the values, one after another"),
    ("--cfg job", "prints the composed config and ends"),
    ("--hydra-help", "lists the options of Hydra"),
]
_ALL = "all"  # every key
_MOST_EXAMPLES = 4  # command lines in the help that fits a screen
# The help that fits a screen explains those of these keys that a command has, and only names the
# others.
_FIRST = (
    *(
        "head",
        "heads",
        "head.depth",
        "samples",
        "prompts",
        "num_prompts",
        "num_dev_prompts",
        "data.num_train",
    ),
    *(
        "trainer.max_epochs",
        "optimizer.lr",
        "loader.batch_size",
        "warp.temperature",
        "data.max_new_tokens",
        "split",
        "ratios",
    ),
    *(
        "num_live_prompts",
        "concurrency",
        "repeats",
        "serving",
        "runner",
        "generation.batch_size",
        "paths.outputs",
        "resume",
    ),
)
_MOST_KEYS = 10


class Section(NamedTuple):
    """Rows of the help: "key=value", or "key.*" for a group of keys, and its explanation."""

    title: str
    description: str
    rows: list[tuple[str, str]]


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
    console = Console(
        file=(output := StringIO()), width=width, markup=False, emoji=False, highlight=False
    )
    listed = sections(cfg, chosen, command)
    is_short = not of
    if is_short or of == _ALL:
        about = "\n".join(line for line in _head_of(command) if not line.startswith(" "))
        console.print(f"usage: {PROGRAMS[command]} [key=value ...]\n\n{about}")
        for line in usage_head(command)[: _MOST_EXAMPLES if is_short else None]:
            console.print(f"  {line}", soft_wrap=True)  # a command line stays whole for copying
        console.print()
        used = _most_used(listed) if is_short else []
        groups = _choice_sections(command, chosen)
        more = Section("more", "", _MORE + _HYDRA) if is_short else Section("Hydra", "", _HYDRA)
        listed = [*used[:1], *groups, *(used[1:] if is_short else listed), more]
    else:
        kept = [
            (title, [row for row in rows if row[0].startswith((f"{of}.", f"{of}="))])
            for title, _, rows in listed
        ]
        listed = [Section(title, "", rows) for title, rows in kept if rows]
        if not listed:
            raise UserError(f"--help={of}: there is no such key; --help=all lists every key.")
    for title, description, rows in listed:
        if rows or description:
            console.print(title)
            if description:
                console.print(Padding(description, (0, 0, 0, 2)))
            if rows:
                console.print(_table(rows, console.width, is_short))
            console.print()
    return "\n".join(line.rstrip() for line in output.getvalue().rstrip().splitlines())


def _choice_sections(command: str, chosen: Mapping[str, str | None]) -> list[Section]:
    """Return the config groups with what may be chosen in each."""
    groups = []
    for group, choice in chosen.items():
        marked = _names_in(choice)
        names = dict.fromkeys([*marked, *names_of(group)])
        groups.append(
            (f"{group}=", " | ".join(f"[{name}]" if name in marked else name for name in names))
        )
    return [Section("config groups, [what is chosen here]", "", groups)]


def _most_used(listed: Sequence[Section]) -> list[Section]:
    """Return the first ten keys of `_FIRST` that a command has, and the names of its other keys,
    and groups of keys.
    """
    rows = {row[0].partition("=")[0]: row for section in listed for row in section.rows}
    shown_keys = [key for key in _FIRST if key in rows][:_MOST_KEYS]
    others = [key for key in rows if "." not in key and key not in shown_keys]
    groups = dict.fromkeys(f"{key.partition('.')[0]}.*" for key in rows if "." in key)
    return [
        Section("keys that matter first", "", [rows[key] for key in shown_keys]),
        Section("other keys, and groups of keys", "  ".join([*others, *groups]), []),
    ]


def _table(rows: list[tuple[str, str]], width: int, is_short: bool) -> Table:
    """Return rows in two columns; with `is_short` each is cut to a line.

    A value may be cut, but not a key.
    """
    limit = max(width // (3 if is_short else 2), *(text.find("=") + 4 for text, _ in rows))
    first = Column(
        no_wrap=True, overflow="ellipsis", width=min(limit, max(len(text) + 2 for text, _ in rows))
    )
    table = Table.grid(
        first, Column(no_wrap=is_short, overflow="ellipsis", ratio=1), padding=(0, 2), expand=True
    )
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
    choices: dict[str, str | None] = dict(
        reversed(cfg.hydra.runtime.choices.items())
    )  # Hydra has the last one first
    for override in parsed:  # Hydra does not report a choice that is a list
        if isinstance(names := override.value(), list) and names_of(override.key_or_group):
            choices[override.key_or_group] = shown(names)
    OmegaConf.set_struct(cfg, False)
    del cfg.hydra
    cfg.paths.run = "${paths.outputs}/${command}/<date_time>"  # only a run knows the folder
    groups = [group for group in choices if group.isidentifier()]  # not hydra/launcher
    return cfg, {
        group: choices[group] for group in sorted(groups, key=lambda group: group != "model")
    }


def sections(cfg: DictConfig, chosen: Mapping[str, str | None], command: str) -> list[Section]:
    """Return every key of a composed config with its explanation: first those of no config group,
    then group by group.
    """
    explained: dict[str, str] = {}
    listed = {"": Section("general", "", [])}
    for group, choice in chosen.items():
        files = {
            path.stem: path.read_text("utf-8") for path in (config_folder() / group).glob("*.yaml")
        }
        listed[group] = Section(f"{group}={choice}", read_head(files.get(str(choice), "")), [])
        for name in sorted(files, key=_names_in(choice).__contains__):
            explained |= _comments(files[name], group) if group != GROUP else {}
    explained |= _sentences(command, source_class(cfg.data))
    for key, value in _walk(cast(Mapping[str, Any], OmegaConf.to_container(cfg, resolve=True))):
        rows = listed.get(key.partition(".")[0], listed[""]).rows
        explanation = explained.get(key, "")
        if not isinstance(value, Mapping) or not value:
            rows.append((f"{key}={shown(value)}".replace("\n", "\\n"), explanation))
        elif explanation:
            rows.append((f"{key}.*", explanation))
    return list(listed.values())


def _sentences(command: str, *sources: type) -> dict[str, str]:
    """Return the keys of a command and of sources of prompts, and their sentences of help."""
    of_sources = {
        key: text for cls in sources for key, text in fields_of(cls, "data").items() if text
    }
    return of_sources | keys_of(command).sentences


def read_head(text: str) -> str:
    """Return the comment at the head of a YAML file."""
    head = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return "\n".join(
        line.removeprefix("#").removeprefix(" ")
        for line in head
        if not line.startswith("# @package")
    )


def _comments(text: str, group: str) -> dict[str, str]:
    """Return by key the comments of a choice's file: each follows its key, or goes on in lines of
    its own below.
    """
    package = re.match(r"# @package (\S+)", text)
    path = [package[1] if package else group]
    comments = {}
    for line in text.splitlines():
        if match := re.match(r"( *)(\w+):[^#]*(?:# (.*))?$", line):
            path[1 + len(match[1]) // 2 :] = [match[2]]
            comments[".".join(path)] = match[3] or ""
        elif (match := re.match(r" +# (.*)", line)) and comments:
            comments[".".join(path)] += f" {match[1]}"
    return comments


def _names_in(choice: str | None) -> list[str]:
    """Return the names in a choice: one, several ("[a,b]"), or "null"."""
    return (choice or "null").strip("[]").split(",")


def _walk(content: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every node and leaf that is meant for users, nodes before their
    children.
    """
    for name, value in content.items():
        if name != "_target_":
            yield f"{parent}{name}", value
            yield from _walk(value, f"{parent}{name}.") if isinstance(value, Mapping) else ()


def composition_error(error: Exception, command: str, words: Sequence[str]) -> UserError | None:
    """Return the message for an error that the command line `words` of conf/<command>.yaml raised
    in Hydra, or None.
    """
    ask = f"{PROGRAMS[command]} --help"
    nulls = [
        name
        for word in words
        if word.endswith("=null") and (config_folder() / (name := word[:-5])).is_dir()
    ]
    if nulls and "Config group override" in str(error):
        return UserError(
            f"{nulls[0]}=null: a group of configs cannot be null; write '~{nulls[0]}' to leave it"
            " out."
        )
    if isinstance(error, ConfigCompositionException) and str(error).startswith(
        "Multiple values for "
    ):
        key = str(error).split()[3].rstrip(".")
        return UserError(
            f"+{key}=: a plus adds what is not listed, and {key} is listed; write {key}=<name>"
            " without it."
        )
    where = (
        "the folder of --config-dir"
        if any("config-dir" in word or "searchpath" in word for word in words)
        else "conf/"
    )
    if (
        isinstance(error, yaml.YAMLError | UnicodeDecodeError) and not HydraConfig.initialized()
    ):  # a config has a mistake
        return UserError(
            f"a file in {where} is not valid YAML in UTF-8: {' '.join(str(error).split())}."
        )
    if isinstance(error, ValueError) and str(error).startswith(
        "Invalid defaults list in "
    ):  # Hydra's
        return UserError(
            f"a file in {where} has a mistake: {error}; correct the list, or leave the key out."
        )
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        known = names_of(group)
        return UserError(
            f"{group}={name}: there is no such choice; {closest(name, known)}use one of"
            f" {', '.join(known)}, or write <folder>/{group}/{name}.yaml and add --config-dir"
            " <folder>."
        )
    if isinstance(error, MissingMandatoryValue):
        key = str(error.full_key)
        return UserError(
            f"{key} has no value, but the command needs one; write {key}=<value> ({ask}={key} says"
            " what it is)."
        )
    if isinstance(error, ConfigCompositionException) and isinstance(
        error.__cause__, OmegaConfBaseException
    ):
        key = str(error.__cause__.full_key)
        word = next((word for word in words if re.match(rf"[+~]*{re.escape(key)}[.=]", word)), key)
        close = closest(
            word.partition("=")[0], list(_sentences(command, DatasetSource, NanoSource))
        )
        adds = f", and +{word} adds one" if key.startswith(("trainer", "logger")) else ""
        return UserError(f"{word}: there is no such key; {close}{ask}=all lists every key{adds}.")
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        if (
            key in words
            or key.startswith(("'", '"'))
            or value[:1] in ("[", "'", '"')
            or re.match(r"\{\w+:", value)
        ):
            how = (
                "write key=value, with each bracket and quote closed, and quotes of the shell"
                " around all of it"
            )
        else:
            quoted = shlex.quote('{}="{}"'.format(key, value.replace('"', '\\"')))
            how = (
                "a text with signs such as = and { needs quotes of its own within those of the"
                f" shell: {quoted}"
            )
        return UserError(
            f"{error.override}: this cannot be read ({str(error).splitlines()[0]}); {how}"
        )
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    reason = f"\n{error.__cause__}" if isinstance(error, HydraException) and error.__cause__ else ""
    return UserError(f"{error}{reason}")


def completions(line: str, word: str) -> list[str]:
    """Return what the last word of a command line may become, each from where the shell's `word`, a
    part of it, begins.
    """
    *before, last = line.split(" ")[1:]
    named = [name for name in VERBS if before[: len(name.split())] == name.split()]
    if not named:
        parts = [name.split() for name in VERBS]
        known = [
            f"{each[len(before)]} "
            for each in parts
            if each[: len(before)] == before and len(each) > len(before)
        ]
    elif (command := VERBS[named[0]].config) is None:
        known = []
    else:
        cfg, chosen = composed(command)
        known = [f"{group}={name}" for group in chosen for name in names_of(group)]
        rows = [row[0] for section in sections(cfg, chosen, command) for row in section.rows]
        known += [row[: row.index("=") + 1] for row in rows if "=" in row]
    start = len(last) - len(word)
    return sorted({each[start:] for each in known if each.startswith(last)})
