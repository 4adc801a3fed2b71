"""The settings and objects of an evaluation, from a composed config: for all commands that replay rules."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from data_gen.settings import Generation
from specheads.commands.compose import plain, settings_of, source_of
from specheads.decoding.load_aware import LengthPolicy
from specheads.decoding.verification import VerificationRule
from specheads.errors import UserError, is_count
from specheads.evaluation.candidates import PolicyChoice, RuleChoice
from specheads.evaluation.prompt_data import PromptData, TestSet, file_source
from specheads.evaluation.settings import Evaluation, ReplaySettings
from specheads.pair_config import config_folder
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.sources import prompt_source
from specheads.settings import Settings, fields_of
from specheads.storage.files import without_home

Replay = TypeVar("Replay", bound=ReplaySettings)


def evaluation_settings(cfg: DictConfig) -> Evaluation:
    """Return the settings of `specheads evaluate`.

    Raises:
        UserError: a value that does not fit, a name that is not in conf/.
    """
    check_names("live_rules", cfg.live_rules, "stopping")
    return replay_settings(
        Evaluation,
        cfg,
        drafting=instantiate(cfg.drafting),
        verification=instantiate(cfg.verification),
        compare_verification=verification_rules(cfg.compare_verification),
    )


def replay_settings(cls: type[Replay], cfg: DictConfig, **objects: Any) -> Replay:
    """Return the settings of a command that replays rules; `objects` are fields built from a config, such as `drafting`."""
    if not is_count(cfg.num_prompts, least=1):  # test sets read it
        raise UserError(
            f"num_prompts={cfg.num_prompts} must be a positive integer; it is {cls.model_fields['num_prompts'].description}."
        )
    objects |= {"stopping": rule_choices(cfg.get("stopping") or {}), "test_sets": named_test_sets(cfg.test_sets, cfg.num_prompts)}
    check_complete(cls, cfg)
    return settings_of(cls, cfg, **objects)


def check_complete(cls: type[Settings], cfg: DictConfig) -> None:
    """Raise UserError for a key of a class of settings that a config lacks."""
    for field in fields_of(cls):
        parent, _, name = field.key.rpartition(".")
        node = OmegaConf.select(cfg, parent) if parent else cfg
        if field.help and isinstance(node, DictConfig) and name not in node:
            raise UserError(f"{field.key} is missing; give it a value: it is {field.help}.")


def rule_choices(stopping: DictConfig | Mapping[str, Mapping[str, Any]]) -> dict[str, RuleChoice | PolicyChoice]:
    """Return the classes of stopping rules and of policies with their arguments, by name."""
    values = OmegaConf.to_container(stopping, resolve=True) if isinstance(stopping, DictConfig) else stopping
    choices: dict[str, RuleChoice | PolicyChoice] = {}
    for name, rule in cast(Mapping[str, Mapping[str, Any]], values).items():
        arguments = dict(rule)
        cls: Any = get_class(arguments.pop("_target_"))
        choices[name] = PolicyChoice(cls, arguments) if issubclass(cls, LengthPolicy) else RuleChoice(cls, arguments)
    return choices


def verification_rules(named: Any) -> dict[str, VerificationRule]:
    """Return rules of conf/verification by name, from a list of names or from {name: {rule: name of a file, key: value}}.

    None: no rules. Without `rule` the name is the file's. Keys that are not given have the values of the file.

    Raises:
        UserError: names and keys that are not known.
    """
    key = "compare_verification"
    values: Any = OmegaConf.to_container(named, resolve=True) if isinstance(named, DictConfig | ListConfig) else named
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        check_names(key, values, "verification")
        values = dict.fromkeys(values)
    return {name: _verification_rule(f"{key}.{name}", name, given) for name, given in values.items()}


def _verification_rule(key: str, name: str, given: Any) -> VerificationRule:
    """Return the rule called `name`, or the one that `given` names, with the values in it."""
    if not isinstance(given, Mapping | None):
        raise UserError(f"{key}={given} must be a rule with its values, for example {{rule: biased, eps: 0.2}}.")
    arguments = dict(given or {})
    rule = arguments.pop("rule", name)
    check_names(f"{key}.rule", [rule], "verification")
    content = OmegaConf.load(config_folder() / "verification" / f"{rule}.yaml")
    if unknown := [argument for argument in arguments if argument not in content]:
        known = ", ".join(str(argument) for argument in content if argument != "_target_") or "none"
        raise UserError(f"{key}.{unknown[0]}={arguments[unknown[0]]} is not known; the keys of {rule} are {known}.")
    return instantiate(content, **arguments)


def named_test_sets(named: Any, num_prompts: Any) -> dict[str, TestSet] | None:
    """Return the sources of more test prompts from {name of conf/data: file}; without a file, that data set's test prompts."""
    if named is None:
        return None
    if not isinstance(named, Mapping | DictConfig):
        raise UserError(
            f"test_sets={named} must be names with files; write for example 'test_sets={{humaneval: humaneval.jsonl}}'."
        )
    check_names("test_sets", list(named), "data")
    sets = {}
    for name, path in named.items():
        data = OmegaConf.load(config_folder() / "data" / f"{name}.yaml")
        source = prompt_source(plain(data))
        if path is None:
            sets[name] = TestSet(source)
        elif isinstance(source, DatasetSource):
            sets[name] = file_source(source, path, num_prompts)
        else:
            raise UserError(f"test_sets={{{name}: {path}}}: {name} reads no file; leave it out: test_sets={{{name}: null}}.")
        sets[name].source.check()
    return sets


def check_names(key: str, names: Any, group: str) -> None:
    """Raise UserError unless `names` is a list of names of a config group."""
    if not isinstance(names, list | ListConfig):
        raise UserError(f"{key}={names} must be a list; write for example '{key}=[{names}]'.")
    known = sorted(path.stem for path in (config_folder() / group).glob("*.yaml") if path.stem != "all")
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"{key} names {unknown[0]!r}, which is not in conf/{group}; use some of {', '.join(known)}.")


def prompt_data(cfg: DictConfig) -> PromptData:
    """Return the prompts that a config describes; raises UserError for mistakes that show before data is read."""
    source, path = source_of(cfg), cfg.data.get("path")
    return PromptData(source, settings_of(Generation, cfg).limits, Path(str(path)).stem if path else None)


def config_text(cfg: DictConfig) -> str:
    """Return a resolved config as YAML, for reports: without the user's home folder."""
    return without_home(OmegaConf.to_yaml(cfg, resolve=True))
