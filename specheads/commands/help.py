"""The text of `--help`: every key of a command, its value, and a sentence from its settings class or YAML file."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from textwrap import TextWrapper
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specheads.commands.experiments import GROUP, REPRODUCE, experiments
from specheads.commands.run_settings import RunSettings
from specheads.commands.yaml_comments import Comments, read_comments
from specheads.errors import UserError
from specheads.pair_config import PairConfig, config_folder
from specheads.prompts.sources import source_class
from specheads.settings import fields_of

PROGRAMS = {
    "train": "specheads train",
    "evaluate": "specheads evaluate",
    "data_gen": "specheads data",
    "layer_search": "specheads papers layer_search",
    "probe": "specheads probe",
    "reproduce": "specheads papers reproduce",
}
DISTILL = "specheads distill"  # stands for `specheads train task=distill`
MORE = {"--help=all": "explains every key in full", "--help=<key>": "explains the keys of a group"}
HYDRA = {
    "+key=value": "adds a key that is not listed; '~key' takes one away",
    "-m key=a,b": "runs every combination of the values, one after another",
    "--cfg job": "prints the composed config and ends",
    "--hydra-help": "lists the options of Hydra",
}
INTERNAL = re.compile(r".*\b_target_$")
ClassesOf = Callable[[DictConfig], Sequence[type]]  # the classes of settings that a composed config is for
RUN_FOLDER = ("${hydra:runtime.output_dir}", "${paths.outputs}/${command}/<date_time>")  # the first is known only within a run
WORDS = re.compile(r"(?:'[^']*'|\S)+")  # of a command line
PLAIN = re.compile(r"[^\s\"'{}\[\],]+")  # text that the command line takes without quotes
NARROWEST, USUAL, WIDEST = 60, 100, 130  # columns of a terminal
ALL = "all"  # every key
MOST_EXAMPLES, MOST_CHOICES = 4, 110  # in the help that fits a screen: command lines, characters of a group's names


@dataclass(frozen=True)
class Section:
    """The keys of one config group, or of no group, and the files that explain them, the chosen ones first."""

    title: str
    description: str
    files: list[Comments]
    rows: list[tuple[str, str]] = field(default_factory=list)  # ("key=value" or "key.*", explanation)

    def has(self, name: str) -> bool:
        """Whether a file has this key, or one within it."""
        return any(key == name or key.startswith(f"{name}.") for file in self.files for key in file.keys)

    def explanation(self, key: str) -> str:
        return next((file.keys[key] for file in self.files if file.keys.get(key)), "")


def help_text(
    command: str,
    overrides: Sequence[str] = (),
    width: int | None = None,
    classes: ClassesOf = lambda cfg: (),
    of: str = ALL,
) -> str:
    """Return the help of conf/<command>.yaml with the values that `overrides` lead to, for a terminal `width` columns wide.

    Args:
        classes: gives the classes whose fields explain the keys; other keys are explained by the comments of the YAML files.
        of: every key; an empty text for a screen with the keys of the first level; or a key, with those in its group.

    Raises:
        HydraException, OmegaConfBaseException: `overrides` do not compose.
        UserError: no key is called `of`.
    """
    width = max(NARROWEST, width or min(WIDEST, shutil.get_terminal_size((USUAL, 24)).columns))
    cfg, chosen = composed(command, overrides)
    listed = sections(command, cfg, chosen, explanations(cfg, classes(cfg)))
    if of not in (ALL, ""):
        return "\n\n".join(_section_texts(_within(listed, of), width))
    most = None if of == ALL else MOST_CHOICES
    groups = [(f"{group}=", _choices(command, group, choice, most)) for group, choice in chosen.items()]
    usage, head = PROGRAMS[command], _read(command).head.splitlines()
    if chosen.get("task") == "distill":  # a verb of its own, whose file says what it is
        usage, head = DISTILL, _read("distill", "task").head.splitlines()
    examples = [number for number, line in enumerate(head) if line.startswith(" ")]
    if of != ALL and len(examples) > MOST_EXAMPLES:
        head = head[: examples[MOST_EXAMPLES]]
    parts = [f"usage: {usage} [key=value ...]", _paragraphs("\n".join(head), width)]
    parts.append("\n".join(["config groups, [what is chosen here]", *_lines(groups, width)]))
    if command == REPRODUCE:
        described = [(name, head.partition("\n")[0]) for name, head in experiments(command).items()]
        parts.append("\n".join(["experiments", *(_lines if of == ALL else _single_lines)(described, width)]))
    if of == ALL:
        parts += _section_texts(listed, width)
    else:
        keys, names = _first_level(listed)
        parts.append("\n".join(["keys", *_single_lines(keys, width)]))
        parts.append(_wrap("  ".join(f"{name}.*" for name in names), width, "groups of keys\n  ", "  "))
    hydra = (
        HYDRA
        if of == ALL
        else {"--help=all": "explains every key in full", "--help=<key>": "explains the keys of a group", **HYDRA}
    )
    return "\n\n".join([*parts, "\n".join(["Hydra" if of == ALL else "more", *_lines(list(hydra.items()), width)])])


def _first_level(listed: Sequence[Section]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the rows of the keys that are in no group, and the names of the groups."""
    rows = [row for section in listed for row in section.rows]
    names = dict.fromkeys(_key(text).partition(".")[0] for text, _ in rows if "." in _key(text) or text.endswith(".*"))
    return [row for row in rows if _key(row[0]).partition(".")[0] not in names], list(names)


def _single_lines(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Return rows in two columns, each cut to the width of a line."""
    limit = width // 3
    shown = [(_cut(text, limit), why) for text, why in rows]
    column = max(len(text) for text, _ in shown)
    lines = [f"  {text:<{column}}  {why}".rstrip() for text, why in shown]
    return [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _within(listed: Sequence[Section], key: str) -> list[Section]:
    """Return the sections with the key and those in its group. Raises UserError if there are none."""
    kept = []
    for each in listed:
        rows = [row for row in each.rows if f"{_key(row[0])}.".startswith(f"{key}.")]
        kept += [Section(each.title, "", each.files, rows)] if rows else []
    if not kept:
        raise UserError(f"--help={key}: there is no such key; --help=all lists every key.")
    return kept


def _key(text: str) -> str:
    """Return the key of a row, "key=value" or "key.*"."""
    return text.partition("=")[0].removesuffix(".*")


def usage_head(command: str) -> list[str]:
    """Return the command lines that the head of conf/<command>.yaml shows."""
    return [line.strip() for line in _read(command).head.splitlines() if line.startswith(" ")]


def composed(command: str, overrides: Sequence[str] = ()) -> tuple[DictConfig, dict[str, str | None]]:
    """Return a command's config without Hydra's node, and the choice of each config group.

    A key that is swept (`head.depth=0,1`) has many values, so it keeps its default.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    single = [str(override.input_line) for override in parsed if not override.is_sweep_override()]
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        content = cast(dict[str, Any], OmegaConf.to_container(compose(command, single, return_hydra_config=True)))
    choices = content.pop("hydra")["runtime"]["choices"]
    # Hydra does not report a choice that is a list.
    usual = {key: value for entry in _defaults(command) if isinstance(entry, Mapping) for key, value in entry.items()}
    several = {override.key_or_group: override.value() for override in parsed}
    choices = _listed(usual) | choices | _listed(several)
    groups = [group for group in reversed(choices) if group.isidentifier()]  # not hydra/launcher; Hydra has the last one first
    groups.sort(key=lambda group: group != "model")
    cfg = cast(DictConfig, OmegaConf.create(OmegaConf.to_yaml(content).replace(*RUN_FOLDER)))
    return cfg, {group: choices[group] for group in groups}


def explanations(cfg: DictConfig, classes: Sequence[type]) -> dict[str, str]:
    """Return by key the sentences of the classes of settings that every command has, and of `classes`."""
    prefixed = [(RunSettings, ""), (PairConfig, "model"), (source_class(cfg.data), "data"), *((cls, "") for cls in classes)]
    return {field.key: field.help for cls, prefix in prefixed for field in fields_of(cls, prefix) if field.help}


def sections(command: str, cfg: DictConfig, chosen: Mapping[str, str | None], explained: Mapping[str, str]) -> list[Section]:
    """Return every key of a composed config with its explanation: first those of no config group, then group by group.

    A key that is in no file (`+trainer.max_steps=9`) is listed with its closest relatives. `explained` are sentences by key.
    """
    listed = [Section("general", "", [_read(name) for name in _files(command)])]
    for group, choice in chosen.items():
        names = choices_of(command, group)
        files = [_read(name, group) for name in sorted(names, key=lambda name: name not in _chosen(choice))]
        listed.append(Section(f"{group}={choice}", files[0].head if choice in names else "", files))
    for key, value in _walk(cast(Mapping[str, Any], OmegaConf.to_container(cfg))):
        section = next((section for name in _upwards(key) for section in listed if section.has(name)), listed[0])
        explanation = explained.get(key) or section.explanation(key)
        if not isinstance(value, Mapping) or not value:
            section.rows.append((f"{key}={_shown(_resolved(cfg, key, value))}", explanation))
        elif explanation:
            section.rows.append((f"{key}.*", explanation))
    return listed


def _read(name: str, group: str = "") -> Comments:
    return read_comments((config_folder() / group / f"{name}.yaml").read_text(), group or "_global_")


def _defaults(command: str) -> list[str | dict[str, Any]]:
    """Return the defaults list of a config's file."""
    return yaml.safe_load((config_folder() / f"{command}.yaml").read_text()).get("defaults", [])


def _files(command: str) -> Iterator[str]:
    """Yield the files of a config that are in no config group, its main file first."""
    yield command
    for entry in _defaults(command):
        if isinstance(entry, str) and entry != "_self_":
            yield from _files(entry)


def _listed(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the config groups in `values` with several choices, as the command line writes them."""
    return {
        key: "[{}]".format(",".join(map(str, names)))
        for key, names in values.items()
        if isinstance(names, list) and (config_folder() / key).is_dir()
    }


def choices_of(command: str, group: str) -> list[str]:
    """Return the names in a config group that a command takes, of those that the project has."""
    return (
        list(experiments(command)) if group == GROUP else sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))
    )


def _choices(command: str, group: str, chosen: str | None, most: int | None = None) -> str:
    """Return the names of a config group, the chosen ones marked, and as many of the others as fit about `most` characters."""
    known = choices_of(command, group)
    elsewhere = [name for name in _chosen(chosen) if name not in ("null", *known)]  # in a folder of the user
    names = [*(() if chosen else ("null",)), *known, *elsewhere]
    left = (most or sum(map(len, names))) - sum(len(name) for name in _chosen(chosen))
    shown = []
    for name in names:
        is_chosen = name in _chosen(chosen)
        left -= 0 if is_chosen else len(name)
        shown += [f"[{name}]"] if is_chosen else [name] if left >= 0 else []
    return " | ".join([*shown, *(["… (--help=all)"] if len(shown) < len(names) else [])])


def _chosen(choice: str | None) -> list[str]:
    """Return the names in a choice: one, several ("[a,b]"), or "null"."""
    return (choice or "null").strip("[]").split(",")


def _walk(content: Mapping[str, Any], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every node and leaf that is meant for users, nodes before their children."""
    for name, value in content.items():
        path = (*parents, str(name))
        if not INTERNAL.match(key := ".".join(path)):
            yield key, value
            if isinstance(value, Mapping):
                yield from _walk(value, path)


def keys_of(cfg: DictConfig) -> list[str]:
    """Return the keys of a composed config that are meant for users, with those of its groups."""
    return [key for key, _ in _walk(cast(Mapping[str, Any], OmegaConf.to_container(cfg)))]


def _upwards(key: str) -> Iterator[str]:
    """Yield a key and the nodes that it lies in, from the inside out."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _resolved(cfg: DictConfig, key: str, value: Any) -> Any:
    """Return a value with its interpolations resolved, or as it is where only a run can do that."""
    if not (isinstance(value, str) and "${" in value):
        return value
    try:
        return OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        return value


def _shown(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, str) and PLAIN.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _section_texts(listed: Sequence[Section], width: int) -> Iterator[str]:
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


def _lines(rows: Sequence[tuple[str, str]], width: int, column: int = 0) -> list[str]:
    """Return rows in two columns, the second wrapped; the first is `column` wide, by default as wide as its longest text."""
    column = column or max(len(text) for text, _ in rows)
    return [_wrap(why, width, f"  {text:<{column}}  ", " " * (column + 4)) for text, why in rows]


def _paragraphs(text: str, width: int) -> str:
    """Return `text` wrapped; indented lines are command lines, which a backslash continues."""
    blocks = groupby(text.splitlines(), key=lambda line: line.startswith(" "))
    wrapped = (
        ["\n".join(_command_line(line, width) for line in lines)] if is_command else [_wrap(" ".join(lines), width)]
        for is_command, lines in blocks
    )
    return "\n".join(each for block in wrapped for each in block)


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
