"""The decoding of an evaluation: a few prompts for the costs, then the rules that are best at
these, until all were decoded.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.drafting import Autoregressive
from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.decoding.step_times import (
    Ends,
    StepTimes,
    counted_ratios,
    step_time_ends,
    step_times,
)
from specheads.decoding.stopping import HeadThreshold
from specheads.decoding.verification import BlockVerification
from specheads.evaluation.candidates import (
    FIXED,
    TARGET_ALONE,
    Candidate,
    CostTable,
    Tuning,
    candidates,
    fixed_length,
)
from specheads.evaluation.replayed_sets import A_TIE, Outcome, replay_all
from specheads.evaluation.report import MEASURED
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import STEP_SHARES, Setup
from specheads.evaluation.sweep import (
    FEWEST_GROUPS,
    REMEDY,
    Measured,
    Sweep,
    doubts_of,
    sweep_settings,
    with_measured,
)
from specheads.forecast import progress
from specheads.prompts.prompt import EncodedPrompt
from specheads.replay.intervals import resample_counts, sums
from specheads.replay.replay import Counts
from specheads.storage.files import write_json

logger = logging.getLogger(__name__)

FEW_LENGTHS, FEW_PROMPTS = (
    (1, 4, 12),
    4,
)  # fixed lengths, and the number of dev prompts that they decode
CONTEXT = 256  # positions in memory while draft steps are timed
PATIENCE = 3.0  # seconds after which slow steps are timed no more often
MOST_SECONDS = 60.0  # that steps are timed on a busy machine
# The half-width of the interval of the ratio, as a share of it, from which on costs are counted
HOPELESS = 0.25
MOST_TURNS = 4  # at most so many times rules are chosen and decoded


def decode_few(setup: Setup) -> list[Measured]:
    """Decode a few dev prompts with fixed lengths, and with the smallest and the largest head."""
    name = "head_threshold"
    settings = [TARGET_ALONE, *map(fixed_length, FEW_LENGTHS)]
    sizes = sorted(setup.heads, key=setup.head_sizes.__getitem__)
    for head in dict.fromkeys(sizes[:1] + sizes[-1:]):
        rule = HeadThreshold(setup.heads[head], 0.5)
        settings.append(
            Candidate(
                name, f"head {head}", rule, rule, {"threshold": 0.5}, rule_name=name, head=head
            )
        )
    return sweep(setup, "costs", settings, setup.prompts.dev.first(FEW_PROMPTS).prompts)


def measured_costs(setup: Setup, measured: Sequence[Measured]) -> CostTable:
    """Return the costs of rules at the cost ratios, and as they were measured."""
    return with_measured(
        setup.counted_costs(), measured, setup.head_sizes, _timed_shares(setup, measured)
    )


def _timed_shares(setup: Setup, measured: Sequence[Measured]) -> dict[str, float]:
    """Return by kind what the decoded rules add to a draft step, as a share of it.

    None for drafts that are no plain chains.
    """
    evaluation = setup.settings
    shares = setup.step_shares
    settings = [each.setting for each in measured if each.setting.rule_name != FIXED]
    rules = {each.kind: (each.step_kind, each.live) for each in settings if each.live is not None}
    if type(evaluation.drafting) is not Autoregressive or not rules:
        return {}
    untimed = {kind: rule for kind, rule in rules.values() if kind not in shares}
    if untimed:
        times = step_times(
            _decoder(setup),
            untimed,
            min(CONTEXT, setup.window // 2),
            verified=(),
            patience=PATIENCE,
        )
        shares |= {kind: times.share(kind) for kind in untimed}
        write_json(setup.run_folder / STEP_SHARES, shares)
    return {under_verification: shares[kind] for under_verification, (kind, _) in rules.items()}


def _decoder(setup: Setup) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        setup.pair, warp=setup.settings.warp, engine=setup.settings.engine, window=setup.window
    )


def settle(setup: Setup, outcome: Outcome, tuning: Tuning, few: Sequence[Measured]) -> Outcome:
    """Decode the chosen rules, fit the costs to their rounds, and choose again, until every chosen
    rule was decoded.
    """
    evaluation = setup.settings
    settings = _chosen_settings(evaluation, outcome, {})
    for turn in range(1, MOST_TURNS + 1):
        name = "generations" if turn == 1 else f"generations-turn-{turn}"
        measured = sweep(setup, name, settings, setup.prompts.decoded.prompts)
        counts = decoded_counts(outcome, settings)
        costs = measured_costs(setup, [*few, *measured])
        doubts = (
            []
            if costs.fit is None
            else [*doubts_of(measured, costs.fit, setup.prompts.decoded.groups)]
        )
        outcome = replace(
            outcome, cost_table=costs, measured=measured, decoded_counts=counts, doubts=doubts
        )
        if turn == 1:  # these are many more rounds than those of the few prompts
            outcome = _tuned_again(setup, outcome, tuning)
        outcome = outcome.chosen()
        decoded = {setting.name: setting for setting in settings}
        chosen = _chosen_settings(evaluation, outcome, decoded)
        missing = [setting for setting in chosen if setting.name not in decoded]
        if not missing or doubts:
            break
        # Rules that are no longer chosen keep their rounds for the costs, but not under block
        # verification.
        kept = {setting.name for setting in chosen}
        settings = [
            *(each for each in settings if each.verification is None or each.name in kept),
            *missing,
        ]
        if turn < MOST_TURNS:
            logger.info(
                "at the costs of these rounds other rules are best: %s",
                ", ".join(setting.name for setting in missing),
            )
    else:
        names = ", ".join(setting.name for setting in missing)
        outcome = replace(
            outcome,
            doubts=[f"The measured costs did not settle, so {names} were not decoded; {REMEDY}."],
        )
    has_enough = len(set(outcome.sets[0].groups)) >= FEWEST_GROUPS
    return settle_by_steps(setup, outcome, tuning) if outcome.doubts and has_enough else outcome


def settle_by_steps(setup: Setup, outcome: Outcome, tuning: Tuning) -> Outcome:
    """Return the outcome with the costs of steps timed by themselves.

    They are counted if MOST_SECONDS tell little of them.
    """
    settings = [each.setting for each in outcome.measured if each.setting.live is not None]
    rules = {
        each.step_kind: each.live
        for each in settings
        if each.rule_name != FIXED and each.live is not None
    }

    def at(ends: Ends) -> Outcome:
        return replace(
            outcome,
            cost_table=with_measured(
                setup.counted_costs(), outcome.measured, setup.head_sizes, ends=ends
            ),
        )

    def agree(ends: Ends) -> bool:
        return len(set(at(ends).choices)) == 1

    logger.info(
        "live figures are not to be trusted: steps are timed by themselves, for %.0f s at most",
        MOST_SECONDS,
    )
    ends = step_time_ends(
        _decoder(setup), rules, min(CONTEXT, setup.window // 2), MOST_SECONDS, agree
    )
    high, middle, low = (each.costs.ratio for each in ends)
    counted = (high - low) / 2 > HOPELESS * middle and not agree(ends)
    if counted:
        (low, high) = counted_ratios(setup.pair)
        alone = ends[1].costs.target_seconds
        shares = {each.step_kind: setup.head_sizes.get(each.head or "", 0.0) for each in settings}
        ends = [
            StepTimes(
                StepCosts(step, alone),
                {kind: RuleCosts(share * step) for kind, share in shares.items()},
            )
            for step in (alone / high, alone / math.sqrt(low * high), alone / low)
        ]
    return replace(_tuned_again(setup, at(ends), tuning).chosen(), counted=counted)


def decoded_counts(outcome: Outcome, settings: Sequence[Candidate]) -> dict[str, Counts]:
    """Return by name the replayed counts of the settings that were decoded.

    Those of earlier turns stay as they are.
    """
    names = {setting.name for setting in settings}
    counts = zip(outcome.candidates, outcome.sets[1].counts, strict=True)
    here = {
        rule.name: of_rule
        for rule, of_rule in counts
        if rule.name in names and rule.ratio in (None, MEASURED)
    }
    return here | dict(outcome.decoded_counts)


def _tuned_again(setup: Setup, outcome: Outcome, tuning: Tuning) -> Outcome:
    """Return the outcome with the candidates for the measured costs fitted to its cost table and
    replayed again.
    """
    tuned = candidates(setup.rules, setup.heads, replace(tuning, cost_table=outcome.cost_table))
    numbers = [number for number, candidate in enumerate(tuned) if candidate.ratio == MEASURED]
    if not numbers:
        return outcome
    rules = list(outcome.candidates)
    sets = [replace(each, counts=list(each.counts)) for each in outcome.sets]
    for number in numbers:
        rules[number] = tuned[number]
    for each, again in zip(
        sets, replay_all(sets, [tuned[number] for number in numbers]), strict=True
    ):
        for number, counts in zip(numbers, again.counts, strict=True):
            each.counts[number] = counts
    return replace(outcome, candidates=rules, sets=sets)


def _chosen_settings(
    evaluation: Evaluation, outcome: Outcome, decoded: Mapping[str, Candidate]
) -> list[Candidate]:
    """Return the best setting of each kind at the measured costs, as it was decoded: rules may have
    been fitted again since.
    """
    settings = [
        decoded.get(setting.name, setting)
        for setting in sweep_settings(best_of_kinds(outcome, decoded))
    ]
    return settings + under_block(settings) if evaluation.tries_block else settings


def under_block(settings: Sequence[Candidate]) -> list[Candidate]:
    """Return the settings that draft, under block verification."""
    rule = BlockVerification()
    return [
        replace(
            setting,
            family=rule.name,
            name=f"{setting.name} verification={rule.name}",
            verification=rule,
        )
        for setting in settings
        if setting.live is not None
    ]


def best_of_kinds(outcome: Outcome, decoded: Collection[str] = ()) -> list[Candidate]:
    """Return the best fixed length at the measured costs, the best rule with a head, and the best
    other one, where there are.
    """
    rules = outcome.candidates
    speeds = outcome.speeds[MEASURED]

    def kind_of(number: int) -> tuple[bool, bool]:
        return rules[number].family != FIXED, rules[number].head is None

    best = sorted(outcome.achievable(MEASURED), key=lambda number: -speeds[number])
    known = [
        number
        for number, rule in enumerate(rules)
        if rule.name in decoded and rule.ratio in (None, MEASURED)
    ]
    chosen = []
    for kind in (
        (False, True),
        (True, False),
        (True, True),
    ):  # fixed lengths, rules with a head, others
        first = next((number for number in best if kind_of(number) == kind), None)
        if first is not None:
            # One that was decoded stands for its kind up to a tie: noise would let another one win
            # in each turn.
            as_fast = [
                n for n in known if kind_of(n) == kind and speeds[n] >= (1 - A_TIE) * speeds[first]
            ]
            chosen.append(rules[max(as_fast, key=speeds.__getitem__, default=first)])
    return chosen


def sweep(
    setup: Setup, name: str, settings: Sequence[Candidate], prompts: Sequence[EncodedPrompt]
) -> list[Measured]:
    """Decode with every setting; finished prompts are kept in the journal `name`."""
    most = setup.settings.max_new_tokens
    repeats = setup.settings.repeats
    total = len(settings) * len(prompts) * repeats
    logger.info(
        "%s: %d settings x %d prompts x %d repeats = %d responses of at most %d tokens, into %s",
        *(name, len(settings), len(prompts), repeats, total, most, setup.run_folder),
    )
    names = [
        (setting.name, repr(setting.verification and setting.verification.compile_key))
        for setting in settings
    ]
    journal = setup.journal(name, prompts, settings=names)
    how = Sweep(setup.pair, setup.settings, setup.window)
    with progress("decoding", total) as advance:
        return how.run(settings, [ids for _, ids in prompts], journal, advance)


def tried_on_dev(setup: Setup, outcome: Outcome) -> dict[str, np.ndarray]:
    """Return the tokens per second (1 + R,) of decoded settings on dev prompts, resampled alike.

    None if these are too few.
    """
    dev = setup.prompts.dev.spread(max(FEWEST_GROUPS, setup.settings.num_live_prompts // 2))
    if len(set(dev.groups)) < FEWEST_GROUPS:
        logger.warning(
            "dev prompts of %d independent texts are too few to choose a setting by; give more of"
            " them (data.num_dev)",
            len(set(dev.groups)),
        )
        return {}
    lossless = setup.settings.verification.lossless
    settings = [
        decoded.setting for decoded in outcome.measured if decoded.setting.live is None or lossless
    ]
    resamples = resample_counts(dev.groups)
    tried = sweep(setup, "dev-trial", settings, dev.prompts)
    return {
        decoded.setting.name: sums(decoded.stats, resamples).tokens_per_second for decoded in tried
    }
