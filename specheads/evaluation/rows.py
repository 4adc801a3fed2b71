"""The rows of a report: what was decoded, the best replayed rule of each family, heads compared,
and rounds in detail.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from specheads.decoding.records import DecodeStats
from specheads.evaluation.answer import fastest_by_kind
from specheads.evaluation.candidates import CEILING, FIXED, TARGET_ALONE, Candidate
from specheads.evaluation.keys import MEASURED, Kind
from specheads.evaluation.replayed_sets import RecordedSet, Results
from specheads.evaluation.report import (
    DataSet,
    LiveRow,
    Reliability,
    RuleRow,
    TextSample,
    Winner,
    rule_fields,
)
from specheads.evaluation.sweep import FEWEST_GROUPS, Measured
from specheads.heads.calibration import IndexCalibration
from specheads.heads.metrics import auroc, calibration
from specheads.pair.pair import Pair
from specheads.replay.intervals import (
    Groups,
    Interval,
    interval,
    milliseconds,
    resample_counts,
    sums,
)
from specheads.replay.recording import Recording
from specheads.replay.replay import RecordedHead, Replayed, head_logits

LEAST_GAP = 0.01  # of the speed of the best fixed length: shares of less mean nothing
NUM_TEXTS = 3  # responses whose rounds are shown in color


def live_rows(results: Results, lossless: bool, groups: Groups) -> list[LiveRow]:
    """Return a row for every setting that was decoded, the target alone first.

    `groups` are those of the decoded prompts.
    """
    resamples = resample_counts(groups)
    totals = {each.setting.name: sums(each.stats, resamples) for each in results.measured}
    speeds = {name: total.tokens_per_second for name, total in totals.items()}
    predicted = results.predicted(len(groups))
    alone = results.cost_table.costs[MEASURED].alone_seconds if predicted else 0.0
    rows = list[LiveRow]()
    for each in results.measured:
        setting = each.setting
        name = setting.name
        other = setting.verification
        row = LiveRow(
            name=name,
            family=setting.family,
            tokens_per_second=interval(speeds[name]),
            speedup=interval(speeds[name] / speeds[TARGET_ALONE.name]),
            **totals[name].rates(),
            milliseconds=milliseconds(each.token_seconds),
            replayed_tokens_per_second=(
                float(predicted[name][0]) / alone if name in predicted else None
            ),
            lossless=setting.live is None or (other.lossless if other else lossless),
            verification=other.name if other else None,
            **rule_fields(setting),
            accepted_over_expected=_accepted_over_expected(each.stats, resamples),
            same_rule=setting.same_rule,
            over_same_rule=_over_same_rule(results, each, groups),
        )
        rows.append(row)
    fastest = fastest_by_kind(rows)
    fixed = fastest.get(Kind.FIXED)
    headless = next(row for kind, row in fastest.items() if kind != Kind.HEAD)
    compared = list[LiveRow]()
    for row in rows:
        speed = speeds[row.name]
        gain = interval(speed / speeds[fixed.name]) if fixed else None
        over_headless = None
        if row.head is not None:
            over_headless = interval(speed / speeds[headless.name])
        compared.append(replace(row, gain=gain, over_headless=over_headless))
    return compared


def _accepted_over_expected(stats: Sequence[DecodeStats], resamples: np.ndarray) -> Interval | None:
    """Return accepted tokens over those that a rule expected; None where it expects no number."""
    expected = [part.num_expected for part in stats]
    if None in expected or not any(expected):
        return None
    accepted = resamples @ np.array([part.num_accepted for part in stats])
    return interval(accepted / np.maximum(resamples @ np.array(expected), 1e-12))


def _over_same_rule(results: Results, measured: Measured, groups: Groups) -> Interval | None:
    """Return how much faster a setting decodes than the same rule under the evaluation's
    verification, by the counts of its decoded rounds at the measured costs of steps.

    These know the difference better than the clock does.
    """
    setting = measured.setting
    table = results.cost_table
    by_name = {each.setting.name: each for each in results.measured}
    is_enough = MEASURED in table.costs and len(set(groups)) >= FEWEST_GROUPS
    if setting.same_rule is None or not is_enough:
        return None
    other = by_name[setting.same_rule]
    resamples = resample_counts(groups)
    ours = table.speedup(measured.counts, resamples, other.setting, MEASURED)
    theirs = table.speedup(other.counts, resamples, other.setting, MEASURED)
    return interval(ours / theirs)


def data_set(replayed: RecordedSet, results: Results) -> DataSet:
    """Return the rates and speed-ups of all rules on one set of prompts, without reliability and
    texts.
    """
    recording = replayed.recording
    resamples = replayed.resamples
    table = results.cost_table
    rows = []
    for rule, counts in zip(results.candidates, replayed.counts, strict=True):
        speedups = dict[str, Interval]()
        for ratio in table.costs:
            if rule.ratio in (None, ratio):
                speedups[ratio] = interval(table.speedup(counts, resamples, rule, ratio))
        row = RuleRow(
            family=rule.family,
            name=rule.name,
            **sums(counts, resamples).rates(),
            speedup=speedups,
            **rule_fields(rule),
        )
        rows.append(row)
    winners = list[Winner]()
    for ratio in results.best:
        winners += winners_of(replayed, results, ratio)
    return DataSet(
        replayed.name,
        replayed.role,
        recording.num_prompts,
        int(recording.lengths.sum()),
        recording.num_samples,
        rows,
        winners,
    )


def winners_of(replayed: RecordedSet, results: Results, ratio: str) -> list[Winner]:
    """Return the best of each family at one ratio, chosen on dev prompts, on a set of prompts."""
    choice = results.best[ratio]
    resamples = replayed.resamples
    table = results.cost_table
    rules = results.candidates

    def speeds_of(number: int, free_head: bool = False) -> np.ndarray:
        counts = replayed.counts[number]
        return table.speedup(counts, resamples, rules[number], ratio, free_head)

    fixed = speeds_of(choice[FIXED])
    ceiling = speeds_of(choice[CEILING]) if CEILING in choice else None
    dev_speeds = results.speeds[ratio]
    unaided = [number for number in results.achievable(ratio) if rules[number].head is None]
    fastest = max(unaided, key=dev_speeds.__getitem__)
    headless = speeds_of(fastest) if dev_speeds[fastest] > 1 else 1.0
    winners = []
    for family, number in choice.items():
        rule = rules[number]
        has_head = rule.head is not None
        speeds = speeds_of(number)
        winner = Winner(
            family=family,
            name=rule.name,
            ratio=ratio,
            speedup=interval(speeds),
            gain=interval(speeds / fixed),
            gap_ceiling=_gap(speeds, fixed, ceiling),
            dev_speedup=float(dev_speeds[number]),
            head_share=table.head_share(rule, ratio),
            gain_uncharged=(
                interval(speeds_of(number, free_head=True) / fixed) if has_head else None
            ),
            over_headless=interval(speeds / headless) if has_head else None,
            **rule_fields(rule),
        )
        winners.append(winner)
    return winners


def _gap(speeds: np.ndarray, fixed: np.ndarray, best: np.ndarray | None) -> Interval | None:
    """Return the share of the gap between the best fixed length and `best` that is closed.

    None where there is no clear gap.
    """
    if best is None or min((ratio := interval(best / fixed)).value, ratio.low) < 1 + LEAST_GAP:
        return None
    return interval((speeds - fixed) / np.maximum(best - fixed, LEAST_GAP / 10 * fixed))


def reliability(recording: Recording, heads: Mapping[str, RecordedHead]) -> list[Reliability]:
    """Return how well heads, raw and calibrated, and the draft's probabilities predict acceptance,
    at every index in a round.
    """
    rows = []
    for name, head in heads.items():
        logits, tokens = head_logits(recording, head)
        token, index = tokens.indices.pairs()
        labels = tokens.accepted[token].double()
        rows.append(_reliability(name, torch.sigmoid(logits[token]), labels))
        if head.config.calibration is not None:
            fitted = IndexCalibration.from_dict(head.config.calibration)(logits[token], index)
            rows.append(_reliability(f"{name}, calibrated", torch.sigmoid(fitted), labels))
    tokens = recording.labels()
    token, _ = tokens.indices.pairs()
    labels = tokens.accepted[token].double()
    features = {"draft probability": "draft_prob", "largest probability": "max_prob"}
    for name, feature in features.items():
        probs = recording.features[feature][tokens.node[token]].double()
        rows.append(_reliability(name, probs, labels))
    return rows


def _reliability(name: str, probs: torch.Tensor, labels: torch.Tensor) -> Reliability:
    curve = calibration(probs, labels)
    return Reliability(
        predictor=name,
        share=curve.share.tolist(),
        predicted=curve.predicted.tolist(),
        observed=curve.observed.tolist(),
        ece=curve.ece,
        auroc=auroc(probs, labels),
    )


def text_samples(
    pair: Pair, recording: Recording, candidate: Candidate, rounds: Replayed
) -> list[TextSample]:
    """Return the first responses in pieces: accepted, rejected or emitted by the target in the
    rounds of the first sample.
    """
    drafts = recording.drafts()
    samples = []
    for number in range(min(NUM_TEXTS, recording.num_prompts)):
        rows = np.flatnonzero((rounds.prompt == number) & (rounds.sample == 0))
        first = int(recording.first[number])
        response = recording.response(number)
        pieces = []
        for row in rows[np.argsort(rounds.start[rows])]:
            start = int(rounds.start[row])
            drafted = int(rounds.drafted[row])
            accepted = int(rounds.accepted[row])
            middle = start + accepted
            branch = int(drafts.branch[first + start])
            rejected = recording.tokens[branch + accepted : branch + drafted].tolist()
            emitted = response[middle : start + int(rounds.tokens[row])]
            parts = (
                ("accepted", response[start:middle]),
                ("rejected", rejected),
                ("target", emitted),
            )
            for kind, ids in parts:
                if ids:
                    pieces.append((kind, pair.decode(ids)))
        samples.append(TextSample(candidate.name, pair.decode(recording.prompts[number]), pieces))
    return samples
