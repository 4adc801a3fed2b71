"""What steps cost on this machine, by which a recording says how fast a rule decodes: steps
timed by themselves, and the overhead of a round from a few that were decoded.
"""

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import (
    CONTEXT,
    Seconds,
    StepTimes,
    TimedSteps,
    time_steps,
)
from specheads.decoding.stopping import FixedLength, StoppingRule
from specheads.decoding.verification import Verification
from specheads.evaluation.candidates import (
    FIXED,
    TARGET_ALONE,
    CostTable,
    Rules,
    fixed_length,
    step_kind,
)
from specheads.evaluation.keys import MEASURED
from specheads.evaluation.setup import Setup
from specheads.evaluation.sweep import Measured, decode
from specheads.progress import progress

logger = logging.getLogger(__name__)

# The number of dev prompts that are decoded for a round's overhead, and of drafted tokens
OVERHEAD_PROMPTS = 8
OVERHEAD_LENGTH = 4


def measured_costs(
    setup: Setup, also: Sequence[Verification] = ()
) -> tuple[CostTable, list[Measured]]:
    """Return the costs of rules at the cost ratios, and as measured on this machine; and the few
    decoded prompts that gave a round's overhead: by the target alone, and a fixed length.

    `also` are other verification rules that will decode: they are compiled along with all steps.
    """
    rules = timed_rules(setup)
    steps = TimedSteps.of(_seconds(setup, rules, also), list(rules))
    prompts = setup.prompts.dev.first(OVERHEAD_PROMPTS).prompts
    fixed = fixed_length(OVERHEAD_LENGTH)
    alone, drafting = decode(setup, "overheads", [TARGET_ALONE, fixed], prompts)
    overheads = overheads_of(alone, drafting, steps.estimate.costs)
    table = cost_table(setup.counted_costs(), steps, overheads, setup.rules)
    return table, [alone, drafting]


@dataclass(frozen=True)
class Overheads:
    """The seconds that decoding takes besides its steps: of a round with a draft, of a token of the
    target alone, and more of a round after a draft that was accepted whole.
    """

    round_seconds: float = 0.0
    alone_seconds: float = 0.0
    whole_seconds: float = 0.0


def overheads_of(alone: Measured, drafting: Measured, costs: StepCosts) -> Overheads:
    """Return the overheads of the rounds of the target alone, and of a plain rule: medians.

    Decoding may be faster than steps were when they were timed. Rounds after drafts that were
    accepted whole are therefore compared with the other rounds, not with their steps.

    A low quantile, by which steps are known, would be that of rounds whose first draft step reads
    one token: rounds differ by more than what other processes add.
    """
    longest = max(each.num_drafted for each in drafting.all_rounds)
    verify = costs.verify_seconds(np.arange(1 + longest))
    usual_rounds = list[float]()
    after_whole = list[float]()
    for rounds in drafting.rounds:
        was_whole = False
        for each in rounds:
            steps = each.num_draft_calls * costs.draft_seconds + verify[each.num_drafted]
            (after_whole if was_whole else usual_rounds).append(each.seconds - steps)
            was_whole = each.is_whole
    more_alone = [each.seconds - costs.target_seconds for each in alone.all_rounds]
    usual = statistics.median(usual_rounds)
    usual_after_whole = statistics.median(after_whole or [usual])
    return Overheads(
        round_seconds=max(0.0, usual),
        alone_seconds=max(0.0, statistics.median(more_alone)),
        whole_seconds=max(0.0, usual_after_whole - usual),
    )


def timed_rules(setup: Setup) -> dict[str, StoppingRule]:
    """Return a rule of each kind whose draft steps are timed: of those with a head, with the
    smallest head and with the largest, between which the costs of others are interpolated.
    """
    sizes = setup.head_sizes
    ends = {}
    if sizes:
        for name in (min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)):
            ends[name] = setup.heads[name]
    rules: dict[str, StoppingRule] = {}
    for name, choice in setup.rules.items():
        if name == FIXED:
            continue
        if not choice.cls.uses_head:
            rules[step_kind(choice.cls, None)] = choice.samples()[0]
            continue
        for head_name, head in ends.items():
            rules[step_kind(choice.cls, head_name)] = choice.samples(head)[0]
    return rules


def _seconds(
    setup: Setup, rules: Mapping[str, StoppingRule], also: Sequence[Verification]
) -> Seconds:
    """Return the seconds of steps; a resumed run reads those that it timed before."""
    journal = setup.journal("step-times", [], rules=list(rules))
    if 0 in journal.entries:
        return journal.entries[0]
    settings = setup.settings
    patience = settings.timing_seconds
    logger.info("timing steps until they are known to 1 %%, for %.0f s at most", patience)
    decoder = SpeculativeDecoder(
        setup.pair, warp=settings.warp, engine=settings.engine, window=setup.window
    )
    fixed = FixedLength(OVERHEAD_LENGTH)
    later = [decoder.with_stopping(fixed, rule) for rule in (None, *also)]
    context = min(CONTEXT, setup.window // 2)
    with progress("steps", patience) as advance:
        seconds = time_steps(
            decoder,
            rules,
            context,
            patience=patience,
            later=later,
            advance=advance,
        )
    journal.add(0, seconds)
    return seconds


def timed_text(table: CostTable) -> str:
    """Return what a step of each model takes, in a few words."""
    costs = table.costs[MEASURED]
    draft = 1000 * costs.draft_seconds
    target = 1000 * costs.target_seconds
    return f"draft {draft:.2g} ms, target {target:.2g} ms a step: ratio {costs.ratio:.1f}"


def cost_table(
    counted: CostTable, steps: TimedSteps, overheads: Overheads, rules: Rules
) -> CostTable:
    """Return the costs of `rules` at the ratios of `counted`, and by timed steps."""
    shares = counted.head_shares
    with_head = [choice.cls for choice in rules.values() if choice.cls.uses_head]

    def complete(times: StepTimes) -> StepTimes:
        costs = replace(
            times.costs,
            round_seconds=overheads.round_seconds,
            alone_overhead=overheads.alone_seconds,
            whole_seconds=overheads.whole_seconds,
        )
        added = dict(times.rules)
        for cls in with_head:
            added |= _of_all_heads(cls, times.rules, shares)
        return StepTimes(costs, added)

    known = TimedSteps(complete(steps.estimate), [complete(each) for each in steps.resamples])
    return CostTable({MEASURED: known.estimate.costs, **counted.costs}, shares, known)


def _of_all_heads(
    cls: type, timed: Mapping[str, float], shares: Mapping[str, float]
) -> dict[str, float]:
    """Return by kind what the rules of a class add to a draft step with each head: those that were
    not timed are between those that were, by their counted shares.
    """
    order = sorted(
        (head for head in shares if step_kind(cls, head) in timed), key=shares.__getitem__
    )
    sizes = [shares[head] for head in order]
    seconds = [timed[step_kind(cls, head)] for head in order]
    added = {}
    for head, share in shares.items():
        kind = step_kind(cls, head)
        added[kind] = timed.get(kind, float(np.interp(share, sizes, seconds)))
    return added
