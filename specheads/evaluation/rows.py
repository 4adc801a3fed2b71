"""The rows of a report: what was decoded, the best replayed rule of each family, heads compared,
and rounds in detail.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from specheads.evaluation.candidates import CEILING, FIXED, TARGET_ALONE, Candidate
from specheads.evaluation.conclusions import fastest_by_kind
from specheads.evaluation.replayed_sets import Outcome, RecordedSet
from specheads.evaluation.report import (
    DataSet,
    Kind,
    LiveRow,
    Reliability,
    RuleRow,
    TextSample,
    Winner,
    rule_fields,
)
from specheads.heads.calibration import IndexCalibration, in_rounds
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


def live_rows(outcome: Outcome, lossless: bool, groups: Groups) -> list[LiveRow]:
    """Return a row for every setting that was decoded, the target alone first.

    `groups` are those of the decoded prompts.
    """
    tried = outcome.tried
    resamples = resample_counts(groups)
    replayed = replayed_speeds(outcome)
    rows = list[LiveRow]()
    totals = {each.setting.name: sums(each.stats, resamples) for each in outcome.measured}
    speeds = {name: total.tokens_per_second for name, total in totals.items()}
    for each in outcome.measured:
        setting = each.setting
        other = each.setting.verification
        expected = [part.num_expected for part in each.stats]
        accepted = None
        if None not in expected and any(expected):
            number = resamples @ np.array([part.num_accepted for part in each.stats])
            accepted = interval(number / np.maximum(resamples @ np.array(expected), 1e-12))
        row = LiveRow(
            name=setting.name,
            family=setting.family,
            tokens_per_second=interval(speeds[setting.name]),
            speedup=interval(speeds[setting.name] / speeds[TARGET_ALONE.name]),
            **totals[setting.name].rates(),
            milliseconds=milliseconds(each.token_seconds),
            replayed_tokens_per_second=replayed.get(setting.name),
            lossless=setting.live is None or (other.lossless if other else lossless),
            verification=other.name if other else None,
            **rule_fields(setting),
            accepted_over_expected=accepted,
            dev_speedup=(
                tried[setting.name][0] / tried[TARGET_ALONE.name][0]
                if setting.name in tried
                else None
            ),
        )
        rows.append(row)
    fastest = fastest_by_kind(rows)
    fixed = fastest.get(Kind.FIXED)
    headless = next(row for kind, row in fastest.items() if kind != Kind.HEAD)
    return [
        replace(
            row,
            gain=interval(speeds[row.name] / speeds[fixed.name]) if fixed else None,
            over_headless=(
                interval(speeds[row.name] / speeds[headless.name]) if row.head is not None else None
            ),
        )
        for row in rows
    ]


def replayed_speeds(outcome: Outcome) -> dict[str, float]:
    """Return by setting its tokens per second on the decoded prompts, from replayed counts.

    None where fewer were replayed.
    """
    speeds = dict[str, float]()
    number = len(outcome.measured[0].stats)
    if not outcome.sets or number > outcome.sets[1].recording.num_prompts:
        return speeds
    for setting in (
        decoded.setting for decoded in outcome.measured if decoded.setting.verification is None
    ):
        if (counts := outcome.decoded_counts.get(setting.name)) is not None:
            costs_by_prompt = enumerate(outcome.cost_table.for_prompts(setting, number))
            seconds = [
                float(costs.seconds(counts.drafted[n], counts.rounds[n]))
                for n, costs in costs_by_prompt
            ]
            speeds[setting.name] = counts.tokens[:number].sum() / sum(seconds)
    return speeds


def data_set(replayed: RecordedSet, outcome: Outcome) -> DataSet:
    """Return the rates and speed-ups of all rules on one set of prompts, without reliability and
    texts.
    """
    recording = replayed.recording
    resamples = replayed.resamples
    cost_table = outcome.cost_table
    counted = list(zip(outcome.candidates, replayed.counts, strict=True))
    speeds = {
        ratio: [cost_table.speedup(counts, resamples, rule, ratio) for rule, counts in counted]
        for ratio in cost_table.costs
    }
    rows = [
        RuleRow(
            family=rule.family,
            name=rule.name,
            parameters=dict(rule.parameters),
            **sums(counts, resamples).rates(),
            speedup={
                ratio: interval(speeds[ratio][number])
                for ratio in cost_table.costs
                if rule.ratio in (None, ratio)
            },
            **rule_fields(rule),
        )
        for number, (rule, counts) in enumerate(counted)
    ]
    winners = [
        winner
        for ratio in outcome.best
        for winner in _winners(replayed, outcome, ratio, speeds[ratio])
    ]
    sizes = recording.num_prompts, int(recording.lengths.sum()), recording.num_samples
    return DataSet(replayed.name, replayed.role, *sizes, rows, winners)


def _winners(
    replayed: RecordedSet, outcome: Outcome, ratio: str, speeds: Sequence[np.ndarray]
) -> list[Winner]:
    """Return the best of each family at one ratio, by `speeds` (1 + R,) of all."""
    choice = outcome.best[ratio]
    resamples = replayed.resamples
    table = outcome.cost_table
    ceiling = speeds[choice[CEILING]] if CEILING in choice else None
    fixed = speeds[choice[FIXED]]
    dev_speeds = outcome.speeds[ratio]
    unaided = [
        number for number in outcome.achievable(ratio) if outcome.candidates[number].head is None
    ]
    fastest = max(unaided, key=dev_speeds.__getitem__)
    headless = speeds[fastest] if dev_speeds[fastest] > 1 else 1.0
    named = [(family, number, outcome.candidates[number]) for family, number in choice.items()]

    def uncharged(number: int, rule: Candidate) -> Interval:
        """Return the gain of a rule if its head cost nothing."""
        return interval(
            table.speedup(replayed.counts[number], resamples, rule, ratio, free_head=True) / fixed
        )

    return [
        Winner(
            family=family,
            name=rule.name,
            ratio=ratio,
            speedup=interval(speeds[number]),
            gain=interval(speeds[number] / fixed),
            gap_ceiling=_gap(speeds[number], fixed, ceiling),
            dev_speedup=float(dev_speeds[number]),
            head_share=(share := table.head_share(rule, ratio)),
            gain_uncharged=None if share is None else uncharged(number, rule),
            over_headless=interval(speeds[number] / headless) if rule.head is not None else None,
            **rule_fields(rule),
        )
        for family, number, rule in named
    ]


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
        raw, calibrated, labels = _logits_in_rounds(recording, head)
        rows.append(_reliability(name, torch.sigmoid(raw), labels))
        if head.config.calibration is not None:
            rows.append(_reliability(f"{name}, calibrated", torch.sigmoid(calibrated), labels))
    node, _, accepted, furthest = recording.labels()
    token, _ = in_rounds(furthest)
    for name, feature in {
        "draft probability": "draft_prob",
        "largest probability": "max_prob",
    }.items():
        rows.append(
            _reliability(
                name, recording.features[feature][node[token]].double(), accepted[token].double()
            )
        )
    return rows


def _logits_in_rounds(
    recording: Recording, head: RecordedHead
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return raw and calibrated logits (n,) of all tokens at every index in a round, and whether
    (n,) they were accepted.
    """
    logits, accepted, furthest, _ = head_logits(recording, head)
    token, index = in_rounds(furthest)
    raw = logits[token]
    return (
        raw,
        IndexCalibration.from_dict(head.config.calibration)(raw, index),
        accepted[token].double(),
    )


def _reliability(name: str, probs: torch.Tensor, labels: torch.Tensor) -> Reliability:
    curve = calibration(probs, labels)
    share, predicted, observed = (
        column.tolist() for column in (curve.share, curve.predicted, curve.observed)
    )
    return Reliability(name, share, predicted, observed, curve.ece, auroc(probs, labels))


def text_samples(
    pair: Pair, recording: Recording, candidate: Candidate, rounds: Replayed
) -> list[TextSample]:
    """Return the first responses in pieces: accepted, rejected or emitted by the target in the
    rounds of the first sample.
    """
    samples = []
    for number in range(min(NUM_TEXTS, recording.num_prompts)):
        rows = np.flatnonzero((rounds.prompt == number) & (rounds.sample == 0))
        first = int(recording.first[number])
        response = recording.response(number)
        pieces = []
        for row in rows[np.argsort(rounds.start[rows])]:
            start, drafted, accepted = (
                int(column[row]) for column in (rounds.start, rounds.drafted, rounds.accepted)
            )
            middle = start + accepted
            branch = int(recording.branch_first[0, first + middle])
            rejected = recording.tokens[branch : branch + drafted - accepted].tolist()
            emitted = response[middle : start + int(rounds.tokens[row])]
            parts = (
                ("accepted", response[start:middle]),
                ("rejected", rejected),
                ("target", emitted),
            )
            pieces += [(kind, pair.decode(ids)) for kind, ids in parts if ids]
        samples.append(TextSample(candidate.name, pair.decode(recording.prompts[number]), pieces))
    return samples
