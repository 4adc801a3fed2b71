"""`specheads evaluate model=llama2-7b head=latest`: record once, replay every stopping rule, decode the best, and report."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from data_gen.settings import Generation
from specheads.commands.command import command
from specheads.commands.compose import load_configured_pair, plain, settings_of, source_of
from specheads.commands.loggers import open_loggers
from specheads.decoding.load_aware import LengthPolicy
from specheads.decoding.stopping import MAX_TOKENS
from specheads.decoding.verification import VerificationRule
from specheads.errors import UserError, is_count
from specheads.evaluation.candidates import PolicyChoice, RuleChoice
from specheads.evaluation.console import print_report
from specheads.evaluation.draft_comparison import compared, read_report
from specheads.evaluation.evaluate import evaluate as evaluate_heads
from specheads.evaluation.head_folders import LocatedHead, find_heads
from specheads.evaluation.prompt_data import PromptData, TestSet, file_source
from specheads.evaluation.recordings import Recorder
from specheads.evaluation.report import Report
from specheads.evaluation.report_files import write_report
from specheads.evaluation.settings import Evaluation
from specheads.pair.config import config_folder
from specheads.pair.pair import Pair
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.prompt import unique
from specheads.prompts.sources import prompt_source
from specheads.replay.response_tree import RecordSettings
from specheads.storage.files import without_home
from specheads.training.heads.calibrate import calibrate, is_kept

logger = logging.getLogger(__name__)


def evaluate(cfg: DictConfig) -> Report:
    """Evaluate a composed config; write and return the report."""
    # Mistakes and failed logins are reported before the models are loaded, which may take minutes.
    settings, data = evaluation_settings(cfg), prompt_data(cfg)
    data.check(settings.split)
    with open_loggers(cfg, Path(cfg.paths.run)) as loggers:
        report = run(cfg, settings, data)
        if loggers:
            from specheads.evaluation.wandb_log import log_report  # imports lightning and wandb

            log_report(report, loggers)
    return report


def run(cfg: DictConfig, settings: Evaluation, data: PromptData) -> Report:
    """Load the models, evaluate, print and write the report."""
    earlier = {where: read_report(where) for where in settings.compare}
    pair = load_configured_pair(cfg)
    folders = Path(cfg.paths.data), Path(cfg.paths.run)

    def located() -> dict[str, LocatedHead]:
        drafting_pair = settings.drafting.pair(pair)
        return find_heads(settings.head, drafting_pair, Path(cfg.paths.outputs), settings.warp, settings.any_draft)

    heads = located()
    logger.info("heads: %s", ", ".join(head.where for head in heads.values()) or "none")
    if settings.calibrate:
        calibrate_again([head.where for head in heads.values()], settings.drafting.pair(pair), settings, data, folders[0])
        heads = located()
    report = evaluate_heads(pair, heads, settings, data, folders, earlier, config_text(cfg))
    try:
        report = replace(report, drafts=compared(report, earlier) if earlier else [])
    finally:  # an evaluation is kept even if it cannot be compared
        print_report(report)
        paths = write_report(report, folders[1])
        print(*paths, f"next: open {paths[0]} in a browser", sep="\n")
    return report


def calibrate_again(
    heads: Sequence[str], pair: Pair, settings: Evaluation, data: PromptData, data_folder: Path
) -> dict[str, dict[str, float]]:
    """Fit the calibration of the heads in these folders to dev prompts; print and return the errors by head (see `calibrate`).

    Raises:
        UserError: no head, a head on the hub, or no dev prompts that the heads did not learn from.
    """
    folders = [Path(where) for where in heads]
    if not folders:
        raise UserError("calibrate=true needs a head, but head=null; name one, or leave out calibrate=true.")
    if elsewhere := [folder for folder in folders if not folder.is_dir()]:
        raise UserError(
            f"head={elsewhere[0]} is on the hub, and a calibration is written into a local folder; download it first."
        )
    limits = replace(data.limits, max_new_tokens=settings.max_new_tokens)
    amounts = RecordSettings(settings.record.num_samples, MAX_TOKENS, settings.record.batch_size)
    recorder = Recorder(pair, settings.warp, limits, amounts, settings.seed, data_folder)
    errors = calibrate(settings.num_dev_prompts, recorder, unique(data.source.load(pair.chats)), folders)
    for folder, (name, error) in zip(folders, errors.items(), strict=True):
        before = f"{error['before']:.1%} with its calibration" if "before" in error else f"{error['raw']:.1%} uncalibrated"
        print(f"{name}: expected calibration error {before}, {error['cross_fitted']:.1%} with one from other prompts of this set")
        is_new = "calibrated" if not is_kept(error) else "left as it is: its calibration is at least as good on these prompts"
        print(f"{folder} {is_new}")
    return errors


@command("evaluate", Generation, Evaluation)
def main(cfg: DictConfig) -> None:
    """Evaluate, print and write the report."""
    evaluate(cfg)


def evaluation_settings(cfg: DictConfig) -> Evaluation:
    """Return the settings of `specheads evaluate`.

    Raises:
        UserError: a value that does not fit, a name that is not in conf/.
    """
    check_names("live_rules", cfg.live_rules, "stopping")
    if not is_count(cfg.num_prompts, least=1):  # test sets read it
        raise UserError(
            f"num_prompts={cfg.num_prompts} must be a positive integer; it is "
            f"{Evaluation.model_fields['num_prompts'].description}."
        )
    return settings_of(
        Evaluation,
        cfg,
        stopping=rule_choices(cfg.get("stopping") or {}),
        test_sets=named_test_sets(cfg.test_sets, cfg.num_prompts),
        drafting=instantiate(cfg.drafting),
        verification=instantiate(cfg.verification),
        compare_verification=verification_rules(cfg.compare_verification),
    )


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
        data = plain(OmegaConf.load(config_folder() / "data" / f"{name}.yaml"))
        source = prompt_source({key: value for key, value in data.items() if key != "defaults"})
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
