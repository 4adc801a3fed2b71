"""An evaluation: record prompts, time steps, replay stopping rules at these costs, choose on dev
prompts, decode the chosen ones once, and report.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from specheads.decoding.verification import BlockVerification
from specheads.evaluation.assembly import report_of
from specheads.evaluation.batches import decode_batches
from specheads.evaluation.candidates import ORACLE_BOUND, Candidate, CostTable, Tuning, candidates
from specheads.evaluation.costs import measured_costs, timed_text
from specheads.evaluation.prompt_sets import PromptData
from specheads.evaluation.recommendations import store_recommendations
from specheads.evaluation.replayed_sets import Results, chosen, record, recorded_text, replay_all
from specheads.evaluation.report import Report
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import decode, disagreements_of, doubts_of, sweep_settings
from specheads.heads.head import AcceptanceHead, LocatedHead
from specheads.pair.pair import Pair
from specheads.progress import stage, waiting

logger = logging.getLogger(__name__)


def evaluate(
    pair: Pair,
    heads: Mapping[str, LocatedHead | AcceptanceHead],
    settings: Evaluation,
    data: PromptData,
    folders: tuple[Path, Path],
    config: str | None = None,
    command: str = "specheads generate",
) -> Report:
    """Evaluate stopping rules on the prompts of `data`.

    Return the report, and store the best thresholds in the heads' folders.

    Args:
        heads: by name, from `find_heads`, or the heads themselves; none: rules without a head.
        folders: the folder of recordings, which other evaluations read again, and the folder of
            this run, for decoded prompts.
        config: the text of the configuration that the report shows; None: the settings.
        command: the words that decode with this pair, to which the report adds those of the
            setting to use.

    Raises:
        UserError: a split without prompts; settings with which nothing can be measured.
    """
    settings = settings.for_pair(pair)
    if not heads and settings.head is not None:
        settings = settings.but(head=None)
    data.check(settings.split)
    pair = settings.drafting.pair(pair)
    located = {}
    for name, head in heads.items():
        located[name] = head if isinstance(head, LocatedHead) else LocatedHead(head, f"<{name}>")
        located[name].head.check_fits(pair)
    setup = Setup(pair, located, settings, data, *folders)
    results = _replayed(setup) if settings.can_replay else Results([], CostTable({}))
    if settings.live != "none":
        results = _decoded(setup, results)
    if settings.concurrency:
        with stage("batches") as say:
            results = replace(results, batches=decode_batches(setup, results))
            sizes = [str(each.concurrency) for each in results.batches]
            say(f"decoded in batches of {', '.join(sizes)}")
    with waiting("comparing settings"):
        report = report_of(setup, results, config, command)
    if not settings.any_draft:
        store_recommendations(setup, results, report)
    return report


def _replayed(setup: Setup) -> Results:
    """Record all prompts, replay every rule at the costs of steps, and choose on dev prompts."""
    with stage("recording") as say:
        dev, *tests = record(setup)
        say(recorded_text([each.recording for each in (dev, *tests)]))
    costs = setup.counted_costs()
    if setup.settings.live != "none":
        with stage("timing") as say:
            also = [BlockVerification()] if setup.settings.tries_block else []
            costs, _ = measured_costs(setup, also)
            say(timed_text(costs))
    with stage("replay") as say:
        tuning = Tuning(dev.recording, costs)
        rules = [*candidates(setup.rules, setup.heads, tuning), ORACLE_BOUND]
        dev, *tests = replay_all([dev, *tests], rules)
        results = chosen(rules, costs, dev, tests)
        say(f"{len(rules)} settings of stopping rules")
    return results


def _decoded(setup: Setup, results: Results) -> Results:
    """Decode the chosen rules once, and say where their speed is not what the recording predicts.

    Where drafts or verification cannot be replayed, every rule of `live_rules` is decoded.
    """
    settings = setup.settings
    prompts = setup.prompts.decoded
    if settings.can_replay:
        to_decode = sweep_settings(results.best_of_kinds)
        if settings.tries_block:
            to_decode += under_block(to_decode)
    else:
        to_decode = _live_rules(setup)
    with stage("decoding") as say:
        measured = decode(setup, "generations", to_decode, prompts.prompts)
        say(f"{len(prompts.prompts)} prompts with {len(to_decode)} settings")
    results = replace(results, measured=measured)
    predicted = results.predicted(len(prompts.prompts))
    return replace(
        results,
        doubts=[*doubts_of(measured, prompts.groups)],
        disagreements=[*disagreements_of(measured, predicted, prompts.groups)],
    )


def under_block(settings: Sequence[Candidate]) -> list[Candidate]:
    """Return the settings that draft, under block verification."""
    rule = BlockVerification()
    verified = list[Candidate]()
    for setting in settings:
        if setting.live is not None:
            changed = replace(
                setting,
                family=rule.name,
                name=f"{setting.name} verification={rule.name}",
                verification=rule,
                same_rule=setting.name,
            )
            verified.append(changed)
    return verified


def _live_rules(setup: Setup) -> list[Candidate]:
    """Return the target alone and every rule of `live_rules` with every value but `auto`, which a
    recording would fit.
    """
    settings = setup.settings
    logger.info(
        "%s are decoded, rule by rule of live_rules: a recording predicts chains under token"
        " verification only",
        settings.method,
    )
    choices = {}
    for name, choice in setup.rules.items():
        if name in settings.live_rules:
            choices[name] = choice.without_auto()
    return sweep_settings(candidates(choices, setup.heads, None), settings.verification.stopping)
