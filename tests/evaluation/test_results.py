"""What evaluations of simulated prompts choose, report and recommend, and rows from counts and
recordings given by hand.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_recording import random_recording
from simulated_evaluations import RATIO, Population, Simulation

from specheads import stopping
from specheads.decoding.records import DecodeStats
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import StepTimes, TimedSteps
from specheads.decoding.verification import BlockVerification
from specheads.evaluation.candidates import (
    CEILING,
    FIXED,
    ORACLE_BOUND,
    TARGET_ALONE,
    Candidate,
    CostTable,
    RuleChoice,
    fixed_length,
)
from specheads.evaluation.evaluate import under_block
from specheads.evaluation.keys import MEASURED
from specheads.evaluation.replayed_sets import (
    RecordedSet,
    Results,
    chosen,
    counts_of,
    longest_draft,
    replay_all,
)
from specheads.evaluation.rows import (
    _gap,
    data_set,
    live_rows,
    reliability,
    text_samples,
    winners_of,
)
from specheads.evaluation.sweep import DecodedRound, Measured
from specheads.heads.metrics import calibration
from specheads.papers import BiasedVerification
from specheads.replay.intervals import Interval
from specheads.replay.recording import Recording
from specheads.replay.replay import Counts, RecordedHead, Replayed, oracle, replay


@pytest.fixture(scope="module")
def simulation():
    return Simulation(Population(120, heads=2, error=1.0), 0.05, num_prompts=(40, 60))


@pytest.fixture(scope="module")
def sets(simulation):
    """Dev prompts, and final ones, with the counts of every rule."""
    dev, final, _ = simulation._samples(np.random.default_rng(0))
    return dev, final


@pytest.fixture(scope="module")
def results(simulation, sets):
    dev, final = sets
    return chosen(simulation.of.rules, simulation.table, dev, [final])


def by_hand(simulation, counts):
    """The speed-up of each rule, by sums."""
    speeds = []
    for rule, each in zip(simulation.of.rules, counts, strict=True):
        step = 0.1 * (1 + simulation.table.head_shares.get(rule.head or "", 0.0))
        speeds.append(each.tokens.sum() / (each.drafted.sum() * step + each.rounds.sum()))
    return speeds


def test_the_best_of_each_family_is_chosen_on_dev_prompts(simulation, sets, results):
    dev, _ = sets
    speeds = by_hand(simulation, dev.counts)
    assert results.speeds[RATIO] == pytest.approx(speeds)
    for family, number in results.best[RATIO].items():
        others = [n for n, rule in enumerate(simulation.of.rules) if rule.family == family]
        assert number == max(others, key=speeds.__getitem__)
    assert results.main_ratio == RATIO


def test_of_each_kind_the_fastest_is_decoded(simulation, results):
    fixed, head, other = results.best_of_kinds
    speeds = dict(
        zip((rule.name for rule in simulation.of.rules), results.speeds[RATIO], strict=True)
    )
    assert fixed.family == FIXED and head.head and other.head is None and other.family != FIXED
    for best in (fixed, head, other):
        alike = [
            speeds[rule.name]
            for rule in simulation.of.rules
            if (rule.family == FIXED, rule.head is None)
            == (best.family == FIXED, best.head is None)
        ]
        assert speeds[best.name] == max(alike)


def test_winners_are_reported_on_other_prompts(simulation, sets, results):
    _, final = sets
    speeds = by_hand(simulation, final.counts)
    best = results.best[RATIO]
    winners = {winner.family: winner for winner in winners_of(final, results, RATIO)}
    unaided = max(
        (number for number in best.values() if simulation.of.rules[number].head is None),
        key=results.speeds[RATIO].__getitem__,
    )
    for family, winner in winners.items():
        number = best[family]
        assert winner.speedup.value == pytest.approx(speeds[number])
        assert winner.gain.value == pytest.approx(speeds[number] / speeds[best[FIXED]])
        assert winner.dev_speedup == results.speeds[RATIO][number] and winner.gap_ceiling is None
        if winner.head is None:
            assert winner.head_share is winner.gain_uncharged is winner.over_headless is None
            continue
        share = simulation.table.head_shares[winner.head]
        assert winner.head_share == pytest.approx(share)
        assert winner.gain_uncharged.value > winner.gain.value
        assert winner.over_headless.value == pytest.approx(speeds[number] / speeds[unaided])
    data = data_set(final, results)
    assert [row.name for row in data.rules] == [rule.name for rule in simulation.of.rules]
    assert data.winners == list(winners.values()) and data.num_prompts == 60
    row = data.rules[5]
    counts = final.counts[5]
    assert row.discard_rate.value == pytest.approx(counts.discarded.sum() / counts.tokens.sum())
    assert row.speedup[RATIO].low < row.speedup[RATIO].value < row.speedup[RATIO].high


def test_rules_for_another_ratio_and_bounds_are_not_used():
    rules = [
        fixed_length(1),
        replace(fixed_length(2), family="b", ratio="20", name="for twenty"),
        replace(fixed_length(3), family=CEILING, bound=True, live=None, name="bound"),
    ]
    recording = random_recording(num_prompts=9, num_samples=1, max_tokens=4, longest=12)
    fast = Counts(
        np.full(9, 100.0), np.full(9, 1.0), np.zeros(9), np.full((9, 1), 20.0), np.zeros(9)
    )
    slow = replace(fast, rounds=np.full((9, 1), 80.0))
    dev = RecordedSet("dev", "dev", recording, range(9), [slow, fast, fast])
    table = CostTable({"10": StepCosts.at_ratio(10), "20": StepCosts.at_ratio(20)})
    found = chosen(rules, table, dev, [])
    assert found.uses == {"10": rules[0].name, "20": "for twenty"}
    assert found.achievable("10") == [0] and found.achievable("20") == [0, 1]
    ceiling = {winner.family: winner for winner in winners_of(dev, found, "20")}
    assert ceiling[CEILING].gap_ceiling.value == 1 and ceiling[FIXED].gap_ceiling.value == 0
    with pytest.raises(ValueError, match="argument"):  # counts of other candidates
        chosen(rules[1:], table, dev, [])


def test_where_timed_steps_say_so_the_measured_ratio_decides(simulation, sets):
    """The head's steps are twice as expensive as they are counted: it is used at the ratio only."""
    dev, final = sets
    rules = simulation.of.rules
    slow = {rule.step_kind: 0.5 for rule in rules if rule.head is not None}
    steps = TimedSteps(StepTimes(StepCosts(1.0, 10.0), slow))
    table = CostTable(
        {MEASURED: steps.estimate.costs, **simulation.table.costs},
        simulation.table.head_shares,
        steps,
    )
    found = chosen(rules, table, dev, [final])
    assert found.main_ratio == MEASURED
    heads = {rule.name for rule in rules if rule.head is not None}
    assert found.uses[RATIO] in heads and found.uses[MEASURED] not in heads


def test_what_was_decoded_is_predicted_on_the_same_prompts(simulation, sets, results):
    _, final = sets
    steps = TimedSteps(StepTimes(StepCosts(1.0, 10.0)))
    table = CostTable({MEASURED: steps.estimate.costs}, steps=steps)
    best = results.best_of_kinds
    decoded = [Measured(TARGET_ALONE), *map(Measured, best), *map(Measured, under_block(best))]
    found = replace(results, cost_table=table, measured=decoded).predicted(20)
    assert list(found) == [rule.name for rule in simulation.of.rules if rule in best]
    fixed, *_ = best
    counts = final.counts[simulation.of.rules.index(fixed)]
    seconds = counts.drafted[:20].sum() + 10 * counts.rounds[:20].sum()
    assert found[fixed.name][0] == pytest.approx(10 * counts.tokens[:20].sum() / seconds)
    assert results.predicted(61) == {}  # fewer prompts were recorded


def decoded(setting, seconds, expected=(None, None)):
    """Two prompts, whose reading took a second each: 10 and 30 tokens, 3 and 9 of them accepted."""
    parts = [
        DecodeStats(tokens, 8, accepted, 8 - accepted, 5, 8, each + 1.0, 1.0, num)
        for tokens, accepted, each, num in zip((10, 30), (3, 9), seconds, expected, strict=True)
    ]
    rounds = [[DecodedRound(2, 0, 0, 0.1, 0.3)], [DecodedRound(1, 0, 0, 0.1, 0.5)]]
    return Measured(setting, parts, rounds)


CONFIDENT = stopping.MaxProbability(0.5, 4)
LOGISTIC = Candidate("logistic", "logistic", CONFIDENT, CONFIDENT, rule_name="logistic")
WITH_HEAD = Candidate(
    "family", "head", CONFIDENT, CONFIDENT, rule_name="head_threshold", head="mine", automatic=True
)
DECODED = [
    decoded(TARGET_ALONE, (8, 12)),
    decoded(fixed_length(2), (4, 6)),
    decoded(LOGISTIC, (5, 3), expected=(6, 10)),
    decoded(WITH_HEAD, (1, 3), expected=(0, 0)),
]


def rows_of(measured, lossless=True):
    rows = live_rows(Results([], CostTable({}), measured=measured), lossless, ["a", "b"])
    return {row.name: row for row in rows}


def test_decoded_speeds_are_over_all_prompts_without_their_reading():
    alone, short, logistic, head = rows_of(DECODED).values()
    speeds = [row.tokens_per_second.value for row in (alone, short, head)]
    assert speeds == [2.0, 4.0, 10.0]
    # Twice as fast on either prompt: resampled alike, no interval
    assert short.speedup == Interval(2.0, 2.0, 2.0) and logistic.speedup.value == 2.5
    assert head.verification_rate.value == 0.25 and head.discard_rate.value == 4 / 40
    assert head.milliseconds == pytest.approx({"p50": 200, "p90": 520, "p99": 592})
    assert (head.rule_name, head.head, head.automatic) == ("head_threshold", "mine", True)
    assert head.gain.value == 10 / 4 and head.over_headless.value == 10 / 5
    assert short.over_headless is None and rows_of([DECODED[0], DECODED[-1]])["head"].gain is None
    assert logistic.accepted_over_expected.value == 12 / 16
    assert head.accepted_over_expected is short.accepted_over_expected is None


@pytest.mark.parametrize("lossless", [True, False])
def test_what_changes_the_distribution_is_marked(lossless):
    others = (None, BlockVerification(), BiasedVerification(0.5))
    settings = [
        replace(fixed_length(2), name=str(number), verification=other)
        for number, other in enumerate(others)
    ]
    measured = [decoded(TARGET_ALONE, (8, 12)), *(decoded(each, (4, 6)) for each in settings)]
    rows = rows_of(measured, lossless)
    assert [row.lossless for row in rows.values()] == [True, lossless, True, False]


def test_another_verification_is_compared_by_counts_and_not_by_the_clock():
    """It takes fewer rounds, but the clock says that it was slower."""
    plain = fixed_length(2)

    def with_rounds(setting, count, seconds):
        tokens = [12 // count] * count
        rounds = [DecodedRound(each, 2, 2, seconds / 2, seconds / 2) for each in tokens]
        stats = DecodeStats(12, 2 * count, 0, 0, count, 2 * count, seconds * count, 0.0)
        return Measured(setting, [stats] * 10, [rounds] * 10)

    measured = [
        with_rounds(TARGET_ALONE, 12, 1.0),
        with_rounds(plain, 6, 1.0),
        with_rounds(*under_block([plain]), 4, 9.0),
    ]
    table = CostTable({MEASURED: StepCosts.at_ratio(10)})
    results = Results([plain], table, measured=measured)
    *_, block = live_rows(results, True, range(10))
    assert block.same_rule == plain.name and block.over_same_rule == Interval(1.5, 1.5, 1.5)
    assert block.speedup.value < 1
    *_, few = live_rows(results, True, [number // 2 for number in range(10)])
    assert few.over_same_rule is None  # of five independent prompts


def test_where_the_ceiling_is_hardly_faster_no_share_of_the_gap_is_reported():
    fixed = np.array([1.0, 0.9, 1.1])
    ours = np.array([1.2, 1.1, 1.3])
    # Nothing pays, or it is not sure that it does
    for ceiling in (fixed, fixed * 1.009, fixed - 0.1, fixed * [1.2, 1.2, 0.8], None):
        assert _gap(ours, fixed, ceiling) is None
    clear = _gap(ours, fixed, fixed * 1.4)
    assert clear.value == pytest.approx(0.5) and 0 < clear.low <= clear.high < 1


def counts(of):
    return [column.tolist() for column in vars(of).values()]


def test_candidates_are_counted_in_their_order_and_the_oracle_among_them():
    small = random_recording(num_prompts=4, num_samples=1, max_tokens=4, longest=12)
    rules = [
        stopping.FixedLength(1),
        None,
        stopping.MaxProbability(0.5, 4),
        stopping.FixedLength(3),
        stopping.FixedLength(1),
    ]
    given = [ORACLE_BOUND if rule is None else Candidate("a", "a", rule, rule) for rule in rules]
    expected = [
        (oracle(small) if rule is None else replay(small, [rule])[0]).per_prompt(4)
        for rule in rules
    ]
    done = []
    found = counts_of(small, given, done.append)
    assert [counts(each) for each in found] == [counts(each) for each in expected]
    assert sum(done) == 5 and len(done) > 2
    sets = [RecordedSet(name, "dev", small, range(4)) for name in "ab"]
    for replayed in replay_all(sets, given):
        assert [counts(each) for each in replayed.counts] == [counts(each) for each in expected]


@pytest.mark.parametrize(("lengths", "longest"), [([3, 5], 20), ([24, 2], 24)])
def test_recorded_drafts_are_long_enough_for_every_rule(lengths, longest):
    rules = {FIXED: RuleChoice(stopping.FixedLength, {"num_tokens": lengths})}
    assert longest_draft(rules) == longest


@pytest.fixture
def recording():
    """Two responses, `abcd` and `ef`; at c the draft proposed `xyz`, at e `w`.

    One acceptance sample.
    """
    accepted = torch.tensor([[True, True, False, True, False, True]])
    lengths = torch.tensor([4, 2])
    return Recording(
        prompts=[[7], [8]],
        first=torch.tensor([0, 4]),
        lengths=lengths,
        limits=lengths + 5,
        finished=torch.tensor([False, False]),
        accepted=accepted,
        branch_first=torch.tensor([[0, 0, 6, 0, 9, 0]]),
        branch_length=torch.tensor([[0, 0, 3, 0, 1, 0]]),
        tokens=torch.tensor([0, 1, 2, 3, 4, 5, 23, 24, 25, 22]),
        features={
            "draft_prob": torch.linspace(0.1, 0.9, 10),
            "max_prob": torch.linspace(0.5, 0.9, 10),
        },
        max_tokens=3,
    )


class Letters:
    def decode(self, ids):
        return "".join(chr(97 + int(i)) for i in ids)


def test_a_response_is_shown_as_its_rounds_made_it(recording):
    columns = ([0, 0, 1, 1], [0] * 4, [0, 3, 0, 1], [4, 0, 1, 0], [2, 0, 0, 0], [3, 1, 1, 1])
    rounds = Replayed(*map(np.array, columns))
    one, other = text_samples(Letters(), recording, fixed_length(4), rounds)
    assert (one.prompt, other.prompt) == ("h", "i") and one.rule == fixed_length(4).name
    assert one.pieces == [("accepted", "ab"), ("rejected", "xy"), ("target", "c"), ("target", "d")]
    assert other.pieces == [("rejected", "w"), ("target", "e"), ("target", "f")]


def test_reliability_is_over_drafted_tokens(recording):
    """There are six positions: four accepted tokens, and the two that were rejected in the place of
    c and e.

    b can also be the second token of a round, and the token that was rejected for c its second or
    third.
    """
    curves = {curve.predictor: curve for curve in reliability(recording, {})}
    assert set(curves) == {"draft probability", "largest probability"}
    curve = curves["draft probability"]
    probs = recording.features["draft_prob"][[0, 1, 6, 3, 9, 5, 1, 6, 6]].double()
    kept = torch.tensor([1.0, 1, 0, 1, 0, 1, 1, 0, 0])
    assert np.dot(curve.share, curve.predicted) == pytest.approx(probs.mean().item())
    assert np.dot(curve.share, curve.observed) == pytest.approx(5 / 9)
    above = sum(float(a > b) for a in probs[kept == 1] for b in probs[kept == 0]) / 20
    assert curve.auroc == pytest.approx(above)
    assert curve.ece == pytest.approx(calibration(probs, kept.double()).ece)


@pytest.mark.parametrize(
    ("predicts", "expected"),
    [("next_token", [0, 1, 6, 3, 9, 5, 1, 6, 6]), ("input_token", [1, 2, 7, 2, 7, 7])],
)
def test_a_calibrated_head_is_reported_raw_and_calibrated(recording, predicts, expected):
    """A head that predicts for its input token does so a node later: nothing follows d, nor the
    branch at e, nor f.
    """
    recording.features["head"] = torch.linspace(-2, 2, 10)
    values = {"slope": [2.0, 1.0], "intercept": [0.0, -1.0]}
    heads = {"mine": RecordedHead("head", predicts, values), "raw": RecordedHead("head", predicts)}
    curves = {curve.predictor: curve for curve in reliability(recording, heads)}
    assert [name for name in curves if "prob" not in name] == ["mine", "mine, calibrated", "raw"]
    assert replace(curves["raw"], predictor="mine") == curves["mine"]
    logits = recording.features["head"][expected].double()
    index = torch.tensor([0] * (len(expected) - 3) + [1, 1, 2])
    calibrated = torch.where(index > 0, logits - 1, 2 * logits)
    for name, values in (("mine", logits), ("mine, calibrated", calibrated)):
        predicted = np.dot(curves[name].share, curves[name].predicted)
        assert predicted == pytest.approx(torch.sigmoid(values).mean().item())
