"""Rows of a report from replayed prompts: the best rule of each family with intervals, heads compared, and rounds in detail."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from specheads.evaluation.candidates import CEILING, FIXED, ORACLE, Candidate
from specheads.evaluation.intervals import Interval, Sums, interval, replayed_sums
from specheads.evaluation.replayed_sets import Choices, ReplayedSet
from specheads.evaluation.report import (
    BankRow,
    DataSet,
    Positions,
    Reliability,
    RuleFields,
    RuleRow,
    TextSample,
    Winner,
    rule_fields,
)
from specheads.heads.calibration import IndexCalibration, in_rounds
from specheads.heads.metrics import auroc, binary_kl, calibration, ece_by_index
from specheads.pair.pair import Pair
from specheads.replay.recording import Recording
from specheads.replay.replay import RecordedHead, Replayed, head_logits

ORACLE_FIELDS = RuleFields(rule_name=ORACLE, bound=True)


def data_set(replayed: ReplayedSet, choices: Choices) -> DataSet:
    """Return the rates and speed-ups of all rules on one set of prompts, without reliability and texts."""
    recording, resamples, cost_table = replayed.recording, replayed.resamples, choices.cost_table
    rules: list[Candidate | None] = [*choices.candidates, None]  # None: the oracle
    speeds = {
        ratio: [cost_table.speedup(counts, resamples, rule, ratio) for counts, rule in zip(replayed.counts, rules, strict=True)]
        for ratio in cost_table.costs
    }
    rows = []
    for number, rule in enumerate(rules):
        sums = replayed_sums(replayed.counts[number], resamples)
        meant_for = [ratio for ratio in cost_table.costs if rule is None or rule.ratio in (None, ratio)]
        rows.append(
            RuleRow(
                family=rule.family if rule else ORACLE,
                name=rule.name if rule else ORACLE,
                parameters=dict(rule.parameters) if rule else {},
                value=rule.value if rule else None,
                discard_rate=interval(sums.discard_rate),
                verification_rate=interval(sums.verification_rate),
                block_efficiency=float(1 / sums.verification_rate[0]),
                acceptance_rate=_acceptance_rate(sums),
                speedup={ratio: interval(speeds[ratio][number]) for ratio in meant_for},
                **rule_fields(rule or ORACLE_FIELDS),
            )
        )
    winners = [winner for ratio in choices.best for winner in _winners(replayed, choices, ratio, speeds[ratio])]
    sizes = recording.num_prompts, int(recording.lengths.sum()), recording.num_samples
    return DataSet(replayed.name, replayed.role, *sizes, rows, winners)


def _acceptance_rate(sums: Sums) -> float | None:
    return float(sums.accepted[0] / sums.drafted[0]) if sums.drafted[0] else None


def _winners(replayed: ReplayedSet, choices: Choices, ratio: str, speeds: Sequence[np.ndarray]) -> list[Winner]:
    """Return the best of each family at one ratio, and the best fixed length in hindsight: the one that is fastest on this set.

    Args:
        speeds: every candidate's speed-ups (1 + R,) on this set.
    """
    candidates, cost_table, choice = choices.candidates, choices.cost_table, choices.best[ratio]
    fixed, ceiling = (speeds[choice[family]] if family in choice else None for family in (FIXED, CEILING))
    lengths = [number for number, candidate in enumerate(candidates) if candidate.family == FIXED]
    chosen = [(family, number, False) for family, number in choice.items()]
    if lengths:
        chosen.insert(1, (f"{FIXED} in hindsight", max(lengths, key=lambda number: speeds[number][0]), True))
    winners = []
    for family, number, in_hindsight in chosen:
        rule = candidates[number] if number < len(candidates) else None
        fields = rule_fields(rule or ORACLE_FIELDS)
        break_even = _break_even(replayed, choices, number, ratio, fixed)
        winners.append(
            Winner(
                family=family,
                name=rule.name if rule else ORACLE,
                ratio=ratio,
                speedup=interval(speeds[number]),
                gain=interval(speeds[number] / (1 if fixed is None else fixed)),
                gap_ceiling=_gap(speeds[number], fixed, ceiling),
                gap_oracle=_gap(speeds[number], fixed, speeds[choice[ORACLE]]),
                dev_speedup=float(choices.speeds[ratio][number]),
                head_share=cost_table.head_share(rule, ratio),
                break_even=break_even,
                **(fields | {"bound": fields["bound"] or in_hindsight}),
            )
        )
    return winners


def _break_even(replayed: ReplayedSet, choices: Choices, number: int, ratio: str, fixed: np.ndarray | None) -> Interval | None:
    """Return the cost of its head at which a candidate would be as fast as the best fixed length, if there are both."""
    if fixed is None:
        return None
    rule = choices.candidates[number] if number < len(choices.candidates) else None
    share = choices.cost_table.break_even(replayed.counts[number], replayed.resamples, rule, ratio, fixed)
    return None if share is None else interval(share)


def _gap(speeds: np.ndarray, fixed: np.ndarray | None, best: np.ndarray | None) -> Interval | None:
    """Return the share of the gap between the best fixed length and `best` that is closed; None where there is no gap."""
    if fixed is None or best is None or not (best[0] > fixed[0]):
        return None
    return interval((speeds - fixed) / (best - fixed))


def bank(heads: Mapping[str, RecordedHead], reported: Sequence[ReplayedSet], choices: Choices) -> list[BankRow]:
    """Return the heads of a bank, the fastest first at the middle ratio; all but the KL is of the first reported set."""
    rows = []
    for name, head in heads.items():
        best = {ratio: number for ratio in choices.best if (number := choices.best_threshold(name, ratio)) is not None}
        if best.keys() == choices.best.keys():  # else no threshold of this head was to be tried
            rows.append(_bank_row(name, head, reported, choices, best))
    return sorted(rows, key=lambda row: -row.speedup[choices.middle].value)


def _bank_row(
    name: str, head: RecordedHead, reported: Sequence[ReplayedSet], choices: Choices, best: Mapping[str, int]
) -> BankRow:
    """Return one head with its best candidate at each ratio, given by number."""
    test = reported[0]
    predicted = {each.name: _logits_in_rounds(each.recording, head)[1:3] for each in reported}
    logits, labels = predicted[test.name]
    candidates, cost_table, resamples = choices.candidates, choices.cost_table, test.resamples
    speeds, break_evens, thresholds, shares = {}, {}, {}, {}
    for ratio, number in best.items():
        rule = candidates[number]
        speeds[ratio] = interval(cost_table.speedup(test.counts[number], resamples, rule, ratio))
        thresholds[ratio], shares[ratio] = rule.value, cost_table.head_share(rule, ratio)
        fixed = choices.best[ratio].get(FIXED)
        if fixed is not None:
            fixed_speeds = cost_table.speedup(test.counts[fixed], resamples, candidates[fixed], ratio)
            break_evens[ratio] = _break_even(test, choices, number, ratio, fixed_speeds)
    return BankRow(
        head=name,
        auroc=auroc(logits, labels),
        kl={where: binary_kl(*tokens).item() for where, tokens in predicted.items()},
        ece=calibration(torch.sigmoid(logits), labels).ece,
        speedup=speeds,
        threshold=thresholds,
        head_share=shares,
        break_even=break_evens,
    )


def reliability(recording: Recording, heads: Mapping[str, RecordedHead]) -> list[Reliability]:
    """Return how well heads and the draft's probabilities predict acceptance, at every index that a token can have in a round.

    A calibrated head has two rows: with its raw predictions and with the calibrated ones that rules use.
    """
    rows = []
    for name, head in heads.items():
        raw, calibrated, labels, index = _logits_in_rounds(recording, head)
        rows.append(_reliability(name, torch.sigmoid(raw), labels, index))
        if head.config.calibration is not None:
            rows.append(_reliability(f"{name}, calibrated", torch.sigmoid(calibrated), labels, index))
    node, _, accepted, furthest = recording.labels()
    token, index = in_rounds(furthest)
    for name, feature in {"draft probability": "draft_prob", "largest probability": "max_prob"}.items():
        rows.append(_reliability(name, recording.features[feature][node[token]].double(), accepted[token].double(), index))
    return rows


def _logits_in_rounds(recording: Recording, head: RecordedHead) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a head's predictions for every drafted token at every index that the token can have in a round.

    Returns, (n,) each: raw logits; calibrated logits, which rules use; whether the token was accepted, 0 or 1; and the index.
    """
    logits, accepted, furthest = head_logits(recording, head)
    token, index = in_rounds(furthest)
    raw = logits[token, index]
    return raw, IndexCalibration.from_dict(head.config.calibration)(raw, index), accepted[token].double(), index


def _reliability(name: str, probs: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> Reliability:
    curve = calibration(probs, labels)
    return Reliability(
        predictor=name,
        share=curve.share.tolist(),
        predicted=curve.predicted.tolist(),
        observed=curve.observed.tolist(),
        ece=curve.ece,
        ece_by_index=ece_by_index(probs, labels, index),
        auroc=auroc(probs, labels),
    )


NUM_TEXTS = 3  # responses whose rounds are shown in color


def positions(candidate: Candidate, rounds: Replayed) -> Positions:
    """Return how many tokens a rule drafted and how many were accepted, by index in the round."""
    longest = int(rounds.drafted.max(initial=0))
    drafted, accepted = (
        [int((column > index).sum()) for index in range(longest)] for column in (rounds.drafted, rounds.accepted)
    )
    return Positions(candidate.family, candidate.name, drafted, accepted, **rule_fields(candidate))


def text_samples(pair: Pair, recording: Recording, candidate: Candidate, rounds: Replayed) -> list[TextSample]:
    """Return the first responses in pieces: accepted, rejected or emitted by the target in the rounds of the first sample."""
    samples = []
    for number in range(min(NUM_TEXTS, recording.num_prompts)):
        rows = np.flatnonzero((rounds.prompt == number) & (rounds.sample == 0))
        first, response, pieces = int(recording.first[number]), recording.response(number), []
        for row in rows[np.argsort(rounds.start[rows])]:
            start, drafted, accepted = (int(column[row]) for column in (rounds.start, rounds.drafted, rounds.accepted))
            middle = start + accepted
            branch = int(recording.branch_first[0, first + middle]) if drafted > accepted else 0
            rejected = recording.tokens[branch : branch + drafted - accepted].tolist()
            emitted = response[middle : start + int(rounds.tokens[row])]
            parts = (("accepted", response[start:middle]), ("rejected", rejected), ("target", emitted))
            pieces += [(kind, pair.decode(ids)) for kind, ids in parts if ids]
        samples.append(TextSample(candidate.name, pair.decode(recording.prompts[number]), pieces))
    return samples
