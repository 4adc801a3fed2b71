"""Replay every candidate on every set of prompts, choose the best of each family on dev prompts, and judge it on the others."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from specheads.evaluation.candidate import CEILING, FIXED, ORACLE, Candidate
from specheads.evaluation.intervals import Interval, Sums, interval, replayed_sums, resample_counts
from specheads.evaluation.results import MEASURED, BankRow, DataSet, Positions, Reliability, RuleRow, TextSample, Winner
from specheads.evaluation.rule_costs import CostTable
from specheads.heads.calibration import IndexCalibration, in_rounds
from specheads.heads.metrics import auroc, binary_kl, calibration, ece_by_index
from specheads.pair import Pair
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts, RecordedHead, Replayed, head_logits, oracle, replay

NUM_TEXTS = 3  # responses whose rounds are shown in color


@dataclass(frozen=True)
class Recorded:
    """A recording of one set of prompts, and what each candidate spent on it; the oracle comes last."""

    name: str
    role: str
    recording: Recording
    counts: Sequence[Counts]
    groups: Sequence[Hashable] | None = None  # that of each prompt; None: each is its own

    @property
    def resamples(self) -> np.ndarray:
        """How often each prompt is in each resample; see resample_counts."""
        return resample_counts(self.groups or self.recording.num_prompts)

    @classmethod
    def of(
        cls,
        name: str,
        role: str,
        recording: Recording,
        candidates: Sequence[Candidate],
        advance: Callable[[int], None],
        groups: Sequence[Hashable] | None = None,
    ) -> "Recorded":
        """Replay all candidates; `advance` is called with how many are done."""
        found: list[Counts | None] = [None] * len(candidates)
        for program in dict.fromkeys(one.rule.compile_key for one in candidates):  # no more rounds at once than one program has
            own = [number for number, one in enumerate(candidates) if one.rule.compile_key == program]
            for number, rounds in zip(own, replay(recording, [candidates[number].rule for number in own]), strict=True):
                found[number] = rounds.per_prompt(recording.num_prompts)
            advance(len(own))
        return cls(name, role, recording, [*found, oracle(recording).per_prompt(recording.num_prompts)], groups)


Choice = dict[str, int]  # family -> number of the best candidate


@dataclass(frozen=True)
class Choices:
    """By ratio the best candidate of every family on dev prompts, and the oracle; and every candidate's speed-up there."""

    best: Mapping[str, Choice]
    speeds: Mapping[str, Sequence[float]]

    @property
    def middle(self) -> str:
        """The ratio in the middle, for what is shown at one only."""
        names = [name for name in self.best if name != MEASURED] or list(self.best)
        return names[len(names) // 2]


def choose(dev: Recorded, candidates: Sequence[Candidate], cost_table: CostTable) -> Choices:
    """Choose on the prompts of `dev`, which are not those that rules are judged on."""
    once = np.ones((1, dev.recording.num_prompts))
    choices, speeds = {}, {}
    for ratio in cost_table.costs:
        speeds[ratio] = [
            float(cost_table.speedup(counts, once, one, ratio)[0])
            for counts, one in zip(dev.counts, [*candidates, None], strict=True)
        ]
        best: Choice = {}
        for number, one in enumerate(candidates):
            if one.ratio in (None, ratio) and (one.family not in best or speeds[ratio][number] > speeds[ratio][best[one.family]]):
                best[one.family] = number
        choices[ratio] = best | {ORACLE: len(candidates)}
    return Choices(choices, speeds)


def data_set(recorded: Recorded, candidates: Sequence[Candidate], choices: Choices, cost_table: CostTable) -> DataSet:
    """Return what replay found on one set of prompts, without reliability and texts."""
    recording = recorded.recording
    resamples = recorded.resamples
    found = [replayed_sums(counts, resamples) for counts in recorded.counts]
    named = [(one.family, one.name, one) for one in candidates] + [(ORACLE, ORACLE, None)]
    speeds = {
        ratio: [
            cost_table.speedup(counts, resamples, one, ratio) for counts, (_, _, one) in zip(recorded.counts, named, strict=True)
        ]
        for ratio in cost_table.costs
    }
    rows = []
    for number, (family, name, one) in enumerate(named):
        meant_for = [ratio for ratio in cost_table.costs if one is None or one.ratio in (None, ratio)]
        rows.append(
            RuleRow(
                family=family,
                name=name,
                parameters=dict(one.parameters) if one else {},
                value=one.value if one else None,
                discard_rate=interval(found[number].discard_rate),
                verification_rate=interval(found[number].verification_rate),
                block_efficiency=float(1 / found[number].verification_rate[0]),
                acceptance_rate=_acceptance_rate(found[number]),
                speedup={ratio: interval(speeds[ratio][number]) for ratio in meant_for},
            )
        )
    winners = []
    for ratio, choice in choices.best.items():
        fixed = speeds[ratio][choice[FIXED]] if FIXED in choice else None
        for winner, number in _winners(ratio, choice, [(f, name) for f, name, _ in named], speeds[ratio], choices.speeds[ratio]):
            one, allowed = named[number][2], None
            if fixed is not None:
                allowed = cost_table.break_even(recorded.counts[number], resamples, one, ratio, fixed)
            share = cost_table.head_share(one, ratio)
            winners.append(replace(winner, head_share=share, break_even=None if allowed is None else interval(allowed)))
    return DataSet(
        recorded.name, recorded.role, recording.num_prompts, int(recording.lengths.sum()), recording.num_samples, rows, winners
    )


def _acceptance_rate(found: Sums) -> float | None:
    return float(found.accepted[0] / found.drafted[0]) if found.drafted[0] else None


def _winners(
    ratio: str, choice: Choice, named: Sequence[tuple[str, str]], speeds: Sequence[np.ndarray], dev_speeds: Sequence[float]
) -> list[tuple[Winner, int]]:
    """Return the best of each family at one ratio with its number, and the best fixed length in hindsight: the one that this data set
    would choose.
    """
    fixed = speeds[choice[FIXED]] if FIXED in choice else None
    ceiling = speeds[choice[CEILING]] if CEILING in choice else None
    lengths = [number for number, (family, _) in enumerate(named) if family == FIXED]
    chosen = list(choice.items())
    if lengths:
        chosen.insert(1, (f"{FIXED} in hindsight", max(lengths, key=lambda number: speeds[number][0])))
    found = []
    for family, number in chosen:
        gain = interval(speeds[number] / (1 if fixed is None else fixed))
        gaps = _gap(speeds[number], fixed, ceiling), _gap(speeds[number], fixed, speeds[choice[ORACLE]])
        winner = Winner(family, named[number][1], ratio, interval(speeds[number]), gain, *gaps, float(dev_speeds[number]))
        found.append((winner, number))
    return found


def _gap(ours: np.ndarray, fixed: np.ndarray | None, best: np.ndarray | None) -> Interval | None:
    """Return the share of the way from the best fixed length to `best`; None where there is no way to go."""
    if fixed is None or best is None or not (best[0] > fixed[0]):
        return None
    return interval((ours - fixed) / (best - fixed))


def reliability(recording: Recording, heads: Mapping[str, RecordedHead]) -> list[Reliability]:
    """Return how heads, and the draft's own probabilities, predict whether a proposed token is accepted, at every index that it can have.

    A calibrated head has two rows: as it is, and as rules hear it.
    """
    rows = []
    for name, head in heads.items():
        raw, heard, labels, index = logits_in_rounds(recording, head)
        rows.append(_reliability(name, torch.sigmoid(raw), labels, index))
        if head.config.calibration is not None:
            rows.append(_reliability(f"{name}, calibrated", torch.sigmoid(heard), labels, index))
    node, _, accepted, furthest = recording.labels()
    token, index = in_rounds(furthest)
    for name, feature in {"draft probability": "draft_prob", "largest probability": "max_prob"}.items():
        rows.append(_reliability(name, recording.features[feature][node[token]].double(), accepted[token].double(), index))
    return rows


def logits_in_rounds(recording: Recording, head: RecordedHead) -> tuple[torch.Tensor, ...]:
    """Return of every proposed token at every index that it can have in a round, (pairs,) each: what a head says of it, raw and as rules
    hear it; whether it was accepted, 0 or 1; and the index.
    """
    logits, accepted, furthest = head_logits(recording, head)
    token, index = in_rounds(furthest)
    raw = logits[token, index]
    return raw, IndexCalibration.from_dict(head.config.calibration)(raw, index), accepted[token].double(), index


def _reliability(name: str, probs: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> Reliability:
    curve = calibration(probs, labels)
    columns = (part.tolist() for part in (curve.share, curve.predicted, curve.observed))
    return Reliability(name, *columns, curve.ece, ece_by_index(probs, labels, index), auroc(probs, labels))


def positions(one: Candidate, rounds: Replayed) -> Positions:
    """Return how far a rule's drafts went, by index in the round."""
    longest = int(rounds.drafted.max(initial=0))
    drafted, accepted = (
        [int((column > index).sum()) for index in range(longest)] for column in (rounds.drafted, rounds.accepted)
    )
    return Positions(one.family, one.name, drafted, accepted)


def text_samples(pair: Pair, recording: Recording, one: Candidate, rounds: Replayed) -> list[TextSample]:
    """Return the first responses in pieces of what was accepted, rejected and the target's own, in the first draw's rounds."""
    samples = []
    for number in range(min(NUM_TEXTS, recording.num_prompts)):
        rows = np.flatnonzero((rounds.prompt == number) & (rounds.draw == 0))
        first, response, pieces = int(recording.first[number]), recording.response(number), []
        for row in rows[np.argsort(rounds.start[rows])]:
            start, drafted, accepted = (int(column[row]) for column in (rounds.start, rounds.drafted, rounds.accepted))
            middle = start + accepted
            branch = int(recording.branch_first[0, first + middle]) if drafted > accepted else 0
            rejected = recording.tokens[branch : branch + drafted - accepted].tolist()
            own = response[middle : start + int(rounds.tokens[row])]
            parts = (("accepted", response[start:middle]), ("rejected", rejected), ("target", own))
            pieces += [(kind, pair.decode(ids)) for kind, ids in parts if ids]
        samples.append(TextSample(one.name, pair.decode(recording.prompts[number]), pieces))
    return samples


def bank(
    heads: Mapping[str, RecordedHead], test: Recorded, candidates: Sequence[Candidate], choices: Choices, cost_table: CostTable
) -> list[BankRow]:
    """Return the heads of a bank, the fastest first at the ratio in the middle."""
    resamples, rows = test.resamples, []
    for name, head in heads.items():
        families = (f"head_threshold {name}", f"head_threshold {name} auto")
        best = {ratio: next((choice[f] for f in families if f in choice), None) for ratio, choice in choices.best.items()}
        if None in best.values():
            continue  # no threshold of it was asked for
        _, logits, labels, _ = logits_in_rounds(test.recording, head)
        speeds, evens = {}, {}
        for ratio, number in best.items():
            counts, one = test.counts[number], candidates[number]
            speeds[ratio] = interval(cost_table.speedup(counts, resamples, one, ratio))
            fixed = choices.best[ratio].get(FIXED)
            if fixed is not None:
                baseline = cost_table.speedup(test.counts[fixed], resamples, candidates[fixed], ratio)
                even = cost_table.break_even(counts, resamples, one, ratio, baseline)
                evens[ratio] = None if even is None else interval(even)
        rows.append(
            BankRow(
                head=name,
                auroc=auroc(logits, labels),
                kl=binary_kl(logits, labels).item(),
                ece=calibration(torch.sigmoid(logits), labels).ece,
                speedup=speeds,
                threshold={ratio: candidates[number].value for ratio, number in best.items()},
                head_share={ratio: cost_table.head_share(candidates[number], ratio) for ratio, number in best.items()},
                break_even=evens,
            )
        )
    return sorted(rows, key=lambda row: -row.speedup[choices.middle].value)
