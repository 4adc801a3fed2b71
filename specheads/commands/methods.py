"""The methods of an experiment from its config: names in conf/drafting, conf/stopping and conf/verification, with overrides."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.utils import get_class, instantiate

from specheads.decoding.drafting import Autoregressive
from specheads.decoding.pairing import check_pairing
from specheads.errors import UserError
from specheads.evaluation.candidate import RuleChoice
from specheads.evaluation.candidates import check_rules
from specheads.evaluation.reproduction.settings import Method
from specheads.pair_config import config_folder

GROUPS = ("drafting", "stopping", "verification")
KEYS = ("name", "baseline", "block", "beams", *GROUPS, "warp")


def methods_of(entries: Any) -> tuple[Method, ...]:
    """Return the methods of a config's list.

    Raises:
        UserError: a name that is not in conf/, a key that its file does not have, values that do not fit each other.
    """
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) and entry.get("name") for entry in entries):
        raise UserError(
            f"methods={entries} must be a list of methods; write each as {{name: ..., drafting: ..., stopping: ...}}."
        )
    return tuple(_method(entry) for entry in entries)


def _method(entry: Mapping[str, Any]) -> Method:
    where = f"methods: {entry['name']}"
    if unknown := [key for key in entry if key not in KEYS]:
        raise UserError(f"{where}: {unknown[0]} is not known; expected one of {', '.join(KEYS)}.")
    chosen = {group: _chosen(where, group, entry[group]) for group in GROUPS if entry.get(group) is not None}
    if entry.get("baseline") and chosen:
        raise UserError(f"{where}: a baseline drafts nothing; leave out {', '.join(chosen)}, or baseline.")
    built = {group: instantiate(arguments) for group, arguments in chosen.items() if group != "stopping"}
    if rule := chosen.get("stopping"):
        built["stopping"] = _rule(where, rule)
    if "verification" in built:
        check_pairing(built.get("drafting", Autoregressive()), built["verification"])
    values = {key: value for key, value in entry.items() if key not in GROUPS}
    return Method(**(values | built), keys=values | {group: dict(arguments) for group, arguments in chosen.items()})


def _chosen(where: str, group: str, given: Any) -> dict[str, Any]:
    """Return the keys of a file of a config group with those that a method gives in their place."""
    name, overrides = (given, {}) if isinstance(given, str) else (given.get("name"), {k: given[k] for k in given if k != "name"})
    names = sorted(path.stem for path in (config_folder() / group).glob("*.yaml") if path.stem != "all")
    if name not in names:
        raise UserError(f"{where}: {group}={name} is not in conf/{group}; use one of {', '.join(names)}.")
    content = _content(config_folder() / group / f"{name}.yaml")
    if unknown := [key for key in overrides if key not in content]:
        known = ", ".join(key for key in content if key != "_target_")
        raise UserError(
            f"{where}: {group}={name} has no key {unknown[0]}; {f'its keys are {known}' if known else 'it has none'}."
        )
    content |= overrides
    for key, value in content.items():
        several = group == "stopping" and isinstance(value, list)
        if several or (isinstance(value, str) and value.startswith(("${", "???"))):
            raise UserError(f"{where}: {group}={name} leaves {key} open; give a value: {{name: {name}, {key}: ...}}.")
    return content


def _content(path: Path) -> dict[str, Any]:
    return cast(dict[str, Any], yaml.safe_load(path.read_text("utf-8")))


def _rule(where: str, content: Mapping[str, Any]) -> RuleChoice:
    """Return a stopping rule; raises UserError for values that it refuses."""
    arguments = dict(content)
    cls: Any = get_class(arguments.pop("_target_"))
    choice = RuleChoice(cls, arguments)
    if not hasattr(cls, "open_parameters") or cls.open_parameters(arguments):
        raise UserError(f"{where}: {cls.__name__} has to be fitted, or is for batches; use a rule whose values are given.")
    try:
        check_rules({"": choice})
    except UserError as error:
        raise UserError(f"{where}: {str(error).replace('stopping..', 'stopping.')}") from None
    return choice
