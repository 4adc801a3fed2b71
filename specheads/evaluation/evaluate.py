"""An evaluation: record prompts, tune stopping rules on dev prompts, decode the best of them, and
report.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from specheads.errors import UserError
from specheads.evaluation.batches import decode_batches
from specheads.evaluation.candidates import ORACLE_BOUND, Tuning, candidates
from specheads.evaluation.decode import decode_few, measured_costs, settle, sweep, tried_on_dev
from specheads.evaluation.prompt_sets import PromptData
from specheads.evaluation.replayed_sets import Outcome, record, replay_all
from specheads.evaluation.report import Report
from specheads.evaluation.reporting import recommend, report_of
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import doubts_of, sweep_settings
from specheads.heads.head import AcceptanceHead, LocatedHead
from specheads.pair.pair import Pair

logger = logging.getLogger(__name__)


def evaluate(
    pair: Pair,
    heads: Mapping[str, LocatedHead | AcceptanceHead],
    settings: Evaluation,
    data: PromptData,
    folders: tuple[Path, Path],
    config: str | None = None,
    command: str = "specheads evaluate",
) -> Report:
    """Evaluate stopping rules on the prompts of `data`.

    Return the report, and store the best thresholds in the heads' folders.

    Args:
        heads: by name, from `find_heads` or as they are; none: rules without a head.
        folders: the folder of recordings, which other evaluations read again, and the folder of
            this run, for decoded prompts.
        config: the text of the configuration that the report shows; None: the settings.
        command: the words that repeat this evaluation, to which the report adds what makes the
            setting to use.

    Raises:
        UserError: a split without prompts; settings with which nothing can be measured.
    """
    settings = settings.for_pair(pair)
    if not heads and settings.head is not None:
        settings = settings.but(head=None)
    data.check(settings.split)
    pair = settings.drafting.pair(pair)
    for head in heads.values():
        (head.head if isinstance(head, LocatedHead) else head).check_fits(pair)
    located = {
        name: head if isinstance(head, LocatedHead) else LocatedHead(head, f"<{name}>")
        for name, head in heads.items()
    }
    setup = Setup(pair, located, settings, data, *folders)
    outcome = _replay_and_decode(setup) if settings.can_replay else _decode_only(setup)
    report = report_of(setup, outcome, config, command)
    if not settings.any_draft:
        recommend(setup, outcome, report)
    return report


def _replay_and_decode(setup: Setup) -> Outcome:
    """Record, replay every rule, choose the best of each family on dev prompts, decode what `live`
    and `concurrency` ask for.
    """
    settings = setup.settings
    recorded = record(setup)
    few = decode_few(setup) if settings.live != "none" else []
    cost_table = measured_costs(setup, few) if few else setup.counted_costs()
    tuning = Tuning(recorded[0].recording, cost_table)
    rules = [*candidates(setup.rules, setup.heads, tuning), ORACLE_BOUND]
    outcome = Outcome(rules, cost_table, replay_all(recorded, rules)).chosen()
    outcome = settle(setup, outcome, tuning, few) if few else outcome
    if few and not outcome.doubts:
        outcome = replace(outcome, tried=tried_on_dev(setup, outcome))
    return (
        replace(outcome, batches=decode_batches(setup, outcome))
        if settings.concurrency
        else outcome
    )


def _decode_only(setup: Setup) -> Outcome:
    """Decode every rule of `live_rules` without a recording, which predicts only chains under token
    verification.
    """
    settings = setup.settings
    logger.info(
        "%s are decoded, rule by rule of live_rules: a recording predicts chains under token"
        " verification only",
        settings.method,
    )
    if settings.live == "none":
        raise UserError(f"live=none, but {settings.method} can only be decoded; use live=winners.")
    chosen = {
        name: choice.without_auto()
        for name, choice in setup.rules.items()
        if name in settings.live_rules
    }
    rules = candidates(chosen, setup.heads, None)
    decoded = setup.prompts.decoded
    measured = sweep(
        setup, "generations", sweep_settings(rules, settings.verification.stopping), decoded.prompts
    )
    costs = measured_costs(setup, measured)
    return Outcome(
        rules,
        costs,
        measured=measured,
        doubts=[*doubts_of(measured, costs.fit, decoded.groups)] if costs.fit else [],
    )
