"""`specheads evaluate` records once, replays every rule, decodes the best, reports.

`specheads probe` says what to expect.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from specheads.commands.command import next_command, print_log
from specheads.commands.compose import (
    keys_of_choice,
    load_configured_pair,
    open_loggers,
    settings_of,
    source_of,
)
from specheads.data_gen.settings import DataGeneration
from specheads.errors import UserError
from specheads.evaluation.candidates import RuleChoice
from specheads.evaluation.evaluate import evaluate
from specheads.evaluation.presentation import (
    log_report,
    print_probe,
    print_report,
    write_report,
)
from specheads.evaluation.probe.probe import Probed, probe
from specheads.evaluation.probe.settings import Probe
from specheads.evaluation.prompt_sets import PromptData, TestSet, file_source
from specheads.evaluation.report import Report
from specheads.evaluation.settings import Evaluation
from specheads.heads.head import LocatedHead, find_heads
from specheads.pair.pair import Pair
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.prompt import encode_prompts, unique
from specheads.prompts.sources import prompt_source
from specheads.replay.calibration import Calibrated
from specheads.replay.recording import Recorder
from specheads.replay.response_tree import RecordSettings
from specheads.storage.files import without_home, write_json
from specheads.training.heads.calibrate import calibrate

logger = logging.getLogger(__name__)


def evaluate_rules(cfg: DictConfig) -> Report:
    """Evaluate a composed config; print, write and return the report."""
    settings = evaluation_settings(cfg)
    data = prompt_data(cfg)
    data_folder = Path(cfg.paths.data)
    run = Path(cfg.paths.run)
    with open_loggers(cfg, run) as loggers:
        pair = load_configured_pair(cfg)
        settings = settings.for_pair(pair)
        drafting_pair = settings.drafting.pair(pair)

        def located() -> dict[str, LocatedHead]:
            outputs = Path(cfg.paths.outputs)
            return find_heads(
                settings.head, drafting_pair, outputs, settings.warp, settings.any_draft
            )

        heads = located()
        logger.info("heads: %s", ", ".join(head.where for head in heads.values()) or "none")
        if settings.calibrate:
            _calibrate_again(
                [head.where for head in heads.values()], drafting_pair, settings, data, data_folder
            )
            heads = located()
        command = without_home(next_command("generate"))
        report = evaluate(
            pair, heads, settings, data, (data_folder, run), _config_text(cfg), command
        )
        print_report(report, verbose=settings.verbose)
        page, numbers = write_report(report, run)
        print(f"report: {page}\nnumbers: {numbers}")
        print_log()
        print(f"next: open {page} in a browser")
        if loggers:
            log_report(report, loggers)
    return report


def _calibrate_again(
    heads: Sequence[str], pair: Pair, settings: Evaluation, data: PromptData, data_folder: Path
) -> dict[str, Calibrated]:
    """Fit the calibration of heads in local folders to dev prompts that are new to them.

    Print and return their errors.
    """
    folders = [Path(where) for where in heads]
    if not folders or not all(folder.is_dir() for folder in folders):
        raise UserError("calibrate=true needs head=<folder>, a local one, which it writes into.")
    limits = replace(data.limits, max_new_tokens=settings.max_new_tokens)
    amounts = RecordSettings(settings.record.num_samples)
    recorder = Recorder(pair, settings.warp, limits, amounts, settings.seed, data_folder)
    prompts = unique(data.source.load(pair.chats))
    dev = encode_prompts(pair, [prompt for prompt in prompts if prompt.split == "dev"], limits)
    found, _ = calibrate(settings.num_dev_prompts, recorder, dev, folders)
    for folder, (name, calibrated) in zip(folders, found.items(), strict=True):
        before = _errors(calibrated, "before" if "before" in calibrated.ece else "raw")
        print(
            f"{name}: calibration error and log loss {before} before,"
            f" {_errors(calibrated, 'cross_fitted')} by {calibrated.best} from other prompts"
        )
        print(f"{folder} {'calibrated' if calibrated.used else 'unchanged: that is not better'}")
    return found


def _errors(calibrated: Calibrated, key: str) -> str:
    return f"{calibrated.ece[key]:.1%} and {calibrated.log_loss[key]:.4f} nats"


def check_strategies(cfg: DictConfig) -> None:
    """Raise UserError for strategies that do not fit, or prompts that the split lacks."""
    prompt_data(cfg).check(evaluation_settings(cfg).split)


def evaluation_settings(cfg: DictConfig) -> Evaluation:
    """Return the settings of `specheads evaluate`.

    Raises UserError for a value that does not fit, or an unknown name.
    """
    settings = settings_of(
        Evaluation,
        cfg,
        stopping=rule_choices(cfg.get("stopping") or {}),
        test_sets=None,
        drafting=instantiate(cfg.drafting),
        verification=instantiate(cfg.verification),
    )
    return settings.but(test_sets=named_test_sets(cfg.test_sets, settings.num_prompts))


Rules = Mapping[str, Mapping[str, object]]


def rule_choices(stopping: DictConfig | Rules) -> dict[str, RuleChoice]:
    """Return the classes of stopping rules with their arguments, by name."""
    rules: object = stopping
    if isinstance(stopping, DictConfig):
        rules = OmegaConf.to_container(stopping, resolve=True)
    choices = {}
    for name, rule in cast(Rules, rules).items():
        arguments = dict(rule)
        choices[name] = RuleChoice(get_class(str(arguments.pop("_target_"))), arguments)
    return choices


def named_test_sets(named: object, num_prompts: int) -> dict[str, TestSet] | None:
    """Return the sources of more test prompts from {name of conf/data: file}.

    Without a file, that data set's test prompts.
    """
    if named is None:
        return None
    if not isinstance(named, Mapping | DictConfig):
        raise UserError(
            f"test_sets={named} must be names with files, such as {{humaneval: humaneval.jsonl}}."
        )
    sets = {}
    for name, path in named.items():
        source = prompt_source(keys_of_choice("test_sets", "data", name, {}))
        if path is None:
            sets[name] = TestSet(source)
        elif isinstance(source, DatasetSource):
            sets[name] = file_source(source, path, num_prompts)
        else:
            raise UserError(f"test_sets={{{name}: {path}}}: {name} reads no file; write null.")
    return sets


def prompt_data(cfg: DictConfig) -> PromptData:
    """Return the prompts that a config describes.

    Raises UserError for mistakes that show before data is read.
    """
    source = source_of(cfg)
    limits = settings_of(DataGeneration, cfg).limits
    path = cfg.data.get("path")
    return PromptData(source, limits, Path(str(path)).stem if path else None)


def _config_text(cfg: DictConfig) -> str:
    """Return a resolved config as YAML, for reports: without the user's home folder."""
    return without_home(OmegaConf.to_yaml(cfg, resolve=True))


def probe_pair(cfg: DictConfig) -> Probed:
    """Probe the pair of a composed config; print and write what was found, and return it.

    Raises UserError as `probe`.
    """
    settings = settings_of(Probe, cfg)
    data = _probed_prompts(cfg)
    pair = load_configured_pair(cfg)

    def following(verb: str, *words: str) -> str:
        return without_home(next_command(verb, *words))  # the report has it, too

    context = {"config": _config_text(cfg)}
    run = Path(cfg.paths.run)
    probed = probe(pair, settings, data, (Path(cfg.paths.data), run), following, context)
    numbers = run / "probe.json"
    write_json(numbers, probed.to_dict())
    print_probe(probed)
    print(f"numbers: {numbers}")
    print_log()
    print(f"next: {probed.answer.command}")
    return probed


def _probed_prompts(cfg: DictConfig) -> PromptData:
    """Return the prompts of a config for a probe: of a local file the first, of a data set the dev
    prompts.
    """
    data = prompt_data(cfg)
    source = data.source
    if not isinstance(source, DatasetSource) or not Path(source.path).expanduser().is_file():
        return data
    first = replace(
        source, test_split=None, num_train=0, num_dev=cfg.num_prompts, num_test=0, num_final=0
    )
    return replace(data, source=first)
