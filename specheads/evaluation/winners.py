"""What the best rule of each family does on a set of prompts: rows of a report, with intervals over prompts."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from specheads.evaluation.candidate import CEILING, FIXED, ORACLE, Candidate
from specheads.evaluation.intervals import Interval, Sums, interval, replayed_sums
from specheads.evaluation.reliability import logits_in_rounds
from specheads.evaluation.replayed_sets import Choice, Choices, ReplayedSet
from specheads.evaluation.report import BankRow, DataSet, RuleRow, Winner
from specheads.evaluation.rule_costs import CostTable
from specheads.heads.metrics import auroc, binary_kl, calibration
from specheads.replay.replay import RecordedHead


def data_set(replayed: ReplayedSet, candidates: Sequence[Candidate], choices: Choices, cost_table: CostTable) -> DataSet:
    """Return the rates and speed-ups of all rules on one set of prompts, without reliability and texts."""
    recording, resamples = replayed.recording, replayed.resamples
    named = [(one.family, one.name, one) for one in candidates] + [(ORACLE, ORACLE, None)]
    speeds = {
        ratio: [
            cost_table.speedup(counts, resamples, rule, ratio)
            for counts, (_, _, rule) in zip(replayed.counts, named, strict=True)
        ]
        for ratio in cost_table.costs
    }
    rows = []
    for number, (family, name, rule) in enumerate(named):
        sums = replayed_sums(replayed.counts[number], resamples)
        meant_for = [ratio for ratio in cost_table.costs if rule is None or rule.ratio in (None, ratio)]
        rows.append(
            RuleRow(
                family=family,
                name=name,
                parameters=dict(rule.parameters) if rule else {},
                value=rule.value if rule else None,
                discard_rate=interval(sums.discard_rate),
                verification_rate=interval(sums.verification_rate),
                block_efficiency=float(1 / sums.verification_rate[0]),
                acceptance_rate=_acceptance_rate(sums),
                speedup={ratio: interval(speeds[ratio][number]) for ratio in meant_for},
            )
        )
    winners = [
        winner
        for ratio, choice in choices.best.items()
        for winner in _winners(replayed, candidates, choice, choices.speeds[ratio], cost_table, speeds[ratio], ratio)
    ]
    sizes = recording.num_prompts, int(recording.lengths.sum()), recording.num_samples
    return DataSet(replayed.name, replayed.role, *sizes, rows, winners)


def _acceptance_rate(sums: Sums) -> float | None:
    return float(sums.accepted[0] / sums.drafted[0]) if sums.drafted[0] else None


def _winners(
    replayed: ReplayedSet,
    candidates: Sequence[Candidate],
    choice: Choice,
    dev_speeds: Sequence[float],
    cost_table: CostTable,
    speeds: Sequence[np.ndarray],
    ratio: str,
) -> list[Winner]:
    """Return the best of each family at one ratio, and the best fixed length in hindsight: the one that is fastest on this set.

    Args:
        choice: by family the number of the best candidate on dev prompts.
        dev_speeds: every candidate's speed-up on dev prompts.
        speeds: every candidate's speed-ups (1 + R,) here.
    """
    fixed, ceiling = (speeds[choice[family]] if family in choice else None for family in (FIXED, CEILING))
    lengths = [number for number, candidate in enumerate(candidates) if candidate.family == FIXED]
    chosen = list(choice.items())
    if lengths:
        chosen.insert(1, (f"{FIXED} in hindsight", max(lengths, key=lambda number: speeds[number][0])))
    winners = []
    for family, number in chosen:
        rule, break_even = candidates[number] if number < len(candidates) else None, None
        if fixed is not None:
            break_even = cost_table.break_even(replayed.counts[number], replayed.resamples, rule, ratio, fixed)
        winners.append(
            Winner(
                family=family,
                name=rule.name if rule else ORACLE,
                ratio=ratio,
                speedup=interval(speeds[number]),
                gain=interval(speeds[number] / (1 if fixed is None else fixed)),
                gap_ceiling=_gap(speeds[number], fixed, ceiling),
                gap_oracle=_gap(speeds[number], fixed, speeds[choice[ORACLE]]),
                dev_speedup=float(dev_speeds[number]),
                head_share=cost_table.head_share(rule, ratio),
                break_even=None if break_even is None else interval(break_even),
            )
        )
    return winners


def _gap(speeds: np.ndarray, fixed: np.ndarray | None, best: np.ndarray | None) -> Interval | None:
    """Return the share of the gap between the best fixed length and `best` that is closed; None where there is no gap."""
    if fixed is None or best is None or not (best[0] > fixed[0]):
        return None
    return interval((speeds - fixed) / (best - fixed))


def bank(
    heads: Mapping[str, RecordedHead], test: ReplayedSet, candidates: Sequence[Candidate], choices: Choices, cost_table: CostTable
) -> list[BankRow]:
    """Return the heads of a bank, the fastest first at the middle ratio."""
    rows = []
    for name, head in heads.items():
        families = (f"head_threshold {name}", f"head_threshold {name} auto")
        best = {ratio: next((choice[f] for f in families if f in choice), None) for ratio, choice in choices.best.items()}
        if None not in best.values():  # else no threshold of this head was to be tried
            rows.append(_bank_row(name, head, test, candidates, choices, cost_table, best))
    return sorted(rows, key=lambda row: -row.speedup[choices.middle].value)


def _bank_row(
    name: str,
    head: RecordedHead,
    test: ReplayedSet,
    candidates: Sequence[Candidate],
    choices: Choices,
    cost_table: CostTable,
    best: Mapping[str, int],
) -> BankRow:
    """Return one head with its best candidate at each ratio, given by number."""
    _, logits, labels, _ = logits_in_rounds(test.recording, head)
    speeds, break_evens, resamples = {}, {}, test.resamples
    for ratio, number in best.items():
        counts, rule = test.counts[number], candidates[number]
        speeds[ratio] = interval(cost_table.speedup(counts, resamples, rule, ratio))
        fixed = choices.best[ratio].get(FIXED)
        if fixed is not None:
            baseline = cost_table.speedup(test.counts[fixed], resamples, candidates[fixed], ratio)
            break_even = cost_table.break_even(counts, resamples, rule, ratio, baseline)
            break_evens[ratio] = None if break_even is None else interval(break_even)
    return BankRow(
        head=name,
        auroc=auroc(logits, labels),
        kl=binary_kl(logits, labels).item(),
        ece=calibration(torch.sigmoid(logits), labels).ece,
        speedup=speeds,
        threshold={ratio: candidates[number].value for ratio, number in best.items()},
        head_share={ratio: cost_table.head_share(candidates[number], ratio) for ratio, number in best.items()},
        break_even=break_evens,
    )
