"""The choice of rules, and their distance from the bounds, on counts made by hand and on a small
recording.
"""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import tiny_pair
from random_recording import random_recording

from specheads import AcceptanceHead, HeadConfig, Warp, stopping
from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.evaluation import replayed_sets
from specheads.evaluation.candidates import (
    CEILING,
    FIXED,
    ORACLE,
    ORACLE_BOUND,
    Candidate,
    CostTable,
    RuleChoice,
)
from specheads.evaluation.replayed_sets import (
    Outcome,
    RecordedSet,
    basis_of,
    counts_of,
    record,
    replay_all,
    survival,
)
from specheads.evaluation.report import MEASURED, ROUNDS, Basis
from specheads.evaluation.rows import _gap, data_set, reliability, text_samples
from specheads.evaluation.settings import Evaluation, RecordingSettings
from specheads.evaluation.sweep import Measured
from specheads.heads.metrics import calibration
from specheads.prompts.prompt import Prompt, ResponseLimits
from specheads.replay.cost import CostFit
from specheads.replay.intervals import Interval
from specheads.replay.recording import Recorder, Recording, load_recording
from specheads.replay.replay import Counts, RecordedHead, Replayed, oracle, replay
from specheads.replay.response_tree import RecordSettings

NUM_PROMPTS = 20
RULE = stopping.FixedLength(2)
THRESHOLD = stopping.HeadThreshold(AcceptanceHead(HeadConfig(8, 0)), 0.5)


def candidate(family, name, ratio=None, head=None):
    return Candidate(
        family,
        name,
        RULE,
        RULE,
        {"number": 1},
        ratio,
        rule_name=family,
        head=head,
        bound=family == CEILING,
    )


CANDIDATES = [
    candidate(FIXED, "few"),
    candidate(FIXED, "many"),
    candidate("head", "a", head="mine"),
    candidate("head", "b", head="mine"),
    candidate("other", "only at ten", "10"),
    candidate(CEILING, "best"),
    ORACLE_BOUND,
]
#            tokens, drafted, accepted, calls per prompt
DEV = [
    (100, 60, 50, 50),
    (100, 200, 60, 40),
    (100, 70, 55, 45),
    (100, 160, 65, 35),
    (100, 60, 55, 45),
    (100, 80, 65, 35),
]
TEST = [
    (100, 60, 45, 55),
    (100, 150, 62, 38),
    (100, 70, 55, 45),
    (100, 160, 62, 38),
    (100, 60, 50, 50),
    (100, 75, 65, 35),
]
LAST = (100, 70, 70, 30)  # the oracle
SHARE, STEP = (
    0.2,
    0.0003,
)  # what a head adds to a draft step: as a share at the ratios, in seconds as measured
COST_TABLE = CostTable(
    {MEASURED: StepCosts(0.001, 0.003), "10": StepCosts.at_ratio(10)},
    {"mine": SHARE},
    measured_heads={"mine": STEP},
    alone=400.0,
)
FREE = replace(COST_TABLE, head_shares={}, measured_heads={})


def recorded(table, role="dev", noise=0.0):
    rng = np.random.default_rng(0)
    scale = 1 + noise * rng.standard_normal(NUM_PROMPTS)
    recording = SimpleNamespace(
        num_prompts=NUM_PROMPTS, lengths=torch.full((NUM_PROMPTS,), 100), num_samples=1
    )
    counts = [
        Counts(np.full(NUM_PROMPTS, float(t)), d * scale, float(a) * scale, (c * scale)[:, None])
        for t, d, a, c in [*table, LAST]
    ]
    return RecordedSet("set", role, recording, range(NUM_PROMPTS), counts)


def speed(row, ratio, head=False):
    tokens, drafted, _, calls = row
    if ratio == "10":
        return tokens / (drafted / 10 * (1 + SHARE * head) + calls)
    return tokens / ((0.001 + STEP * head) * drafted + 0.003 * calls) / 400


def speeds_of(table, ratio):
    return [speed(row, ratio, number in (2, 3)) for number, row in enumerate([*table, LAST])]


@pytest.mark.parametrize("ratio", [MEASURED, "10"])
def test_the_best_of_each_family_is_chosen_on_dev_prompts(ratio):
    outcome = Outcome(CANDIDATES, COST_TABLE, [recorded(DEV)]).chosen()
    speeds = speeds_of(DEV, ratio)
    assert outcome.speeds[ratio] == pytest.approx(speeds)
    best = outcome.best[ratio]
    assert best[FIXED] == max((0, 1), key=speeds.__getitem__) and best["head"] == max(
        (2, 3), key=speeds.__getitem__
    )
    assert ("other" in best) == (ratio == "10")
    assert best[ORACLE] == len(CANDIDATES) - 1
    assert outcome.main_ratio == MEASURED


@pytest.mark.parametrize("ratio", [MEASURED, "10"])
def test_winners_are_reported_on_other_prompts(ratio):
    outcome = Outcome(CANDIDATES, COST_TABLE, [recorded(DEV)]).chosen()
    data = data_set(recorded(TEST, "test"), outcome)
    winners = {winner.family: winner for winner in data.winners if winner.ratio == ratio}
    speeds = speeds_of(TEST, ratio)
    best = outcome.best[ratio]
    dev_speeds = outcome.speeds[ratio]
    fixed, ours, ceiling = (speeds[best[family]] for family in (FIXED, "head", CEILING))
    unaided = max(
        (best[family] for family in (FIXED, "other") if family in best), key=dev_speeds.__getitem__
    )
    head = winners["head"]
    assert head.speedup.value == head.speedup.low == pytest.approx(ours)
    assert head.gain.value == pytest.approx(ours / fixed)
    assert head.gap_ceiling.value == pytest.approx((ours - fixed) / (ceiling - fixed))
    assert head.over_headless.value == pytest.approx(
        ours / (speeds[unaided] if dev_speeds[unaided] > 1 else 1.0)
    )
    assert winners[FIXED].gap_ceiling.value == 0 and winners[
        CEILING
    ].gap_ceiling.value == pytest.approx(1)


@pytest.mark.parametrize(("ratio", "share"), [(MEASURED, STEP / 0.001), ("10", SHARE)])
def test_a_head_pays_its_share_and_gains_more_without(ratio, share):
    outcome = Outcome(CANDIDATES, COST_TABLE, [recorded(DEV)]).chosen()
    table = recorded(TEST, "test", noise=0.1)
    winners = {
        winner.family: winner
        for winner in data_set(table, outcome).winners
        if winner.ratio == ratio
    }
    head = winners["head"]
    fixed = winners[FIXED]
    assert (
        head.head_share == pytest.approx(share)
        and fixed.head_share is fixed.gain_uncharged is fixed.over_headless is None
    )
    free = data_set(table, replace(outcome, cost_table=FREE)).winners
    without = next(winner for winner in free if (winner.family, winner.ratio) == ("head", ratio))
    assert (
        head.gain_uncharged.value == pytest.approx(without.gain.value)
        and without.gain.value > head.gain.value
    )


def test_a_rule_whose_rounds_were_timed_pays_their_costs():
    rule, other = CANDIDATES[2:4]
    timed = replace(
        COST_TABLE, fit=CostFit(COST_TABLE.costs[MEASURED], {rule.kind: RuleCosts(0.0001, 0.0002)})
    )
    other = replace(other, rule=stopping.Confidence())
    assert rule.kind == "FixedLength of mine" and other.kind == "Confidence of mine"
    assert timed.of(rule, MEASURED) == StepCosts(0.0011, 0.003, round_seconds=0.0002)
    assert timed.of(other, MEASURED) == StepCosts(0.0013, 0.003)
    assert timed.of(rule, "10").draft_seconds == pytest.approx(0.1 * (1 + SHARE))
    assert (
        timed.head_share(rule, MEASURED) == pytest.approx(0.1)
        and timed.of(ORACLE_BOUND, MEASURED) == timed.costs[MEASURED]
    )


def test_without_a_draft_step_a_head_has_no_share_of_it():
    free = replace(
        COST_TABLE, costs={MEASURED: StepCosts(0.0, 0.003), "10": StepCosts.at_ratio(10)}
    )
    rule = CANDIDATES[2]
    assert free.head_share(rule, MEASURED) is None and free.head_share(rule, "10") == pytest.approx(
        SHARE
    )


def test_rows_have_the_speed_ups_that_their_rule_is_meant_for():
    outcome = Outcome(CANDIDATES, COST_TABLE, [recorded(DEV)]).chosen()
    data = data_set(recorded(TEST, "test"), outcome)
    assert [row.name for row in data.rules] == [rule.name for rule in CANDIDATES]
    assert [set(row.speedup) for row in data.rules] == [{MEASURED, "10"}] * 4 + [{"10"}] + [
        {MEASURED, "10"}
    ] * 2
    row = data.rules[1]
    assert row.discard_rate.value == pytest.approx(
        0.88
    ) and row.verification_rate.value == pytest.approx(0.38)
    assert row.block_efficiency == pytest.approx(100 / 38) and row.acceptance_rate == pytest.approx(
        62 / 150
    )


def test_a_data_set_has_the_fields_of_its_rules_and_prompts():
    rule = replace(CANDIDATES[2], automatic=True, rule_name="head_threshold")
    outcome = Outcome(
        [*CANDIDATES[:2], rule, *CANDIDATES[3:]], COST_TABLE, [recorded(DEV)]
    ).chosen()
    data = data_set(recorded(TEST, "test"), outcome)
    assert (data.name, data.role, data.num_prompts, data.num_tokens, data.num_samples) == (
        "set",
        "test",
        20,
        2000,
        1,
    )
    row = data.rules[2]
    winner = next(each for each in data.winners if each.family == "head")
    assert (row.family, row.name, row.parameters) == (
        "head",
        "a",
        {"number": 1},
    ) and row.bound is False
    assert (row.rule_name, row.head, row.automatic) == ("head_threshold", "mine", True)
    assert (winner.rule_name, winner.head, winner.automatic) == ("head_threshold", "mine", True)
    assert [(each.name, each.bound) for each in data.winners if each.bound] == [
        ("best", True),
        ("oracle", True),
    ] * 2


@pytest.mark.parametrize(("calls", "over"), [(55, "many"), (45, "few"), (101, None)])
def test_a_head_is_compared_with_what_dev_prompts_chose_without_one(calls, over):
    """It is the fastest there, and the target alone where nothing is faster than that."""
    dev = [
        (100, 0, 50, calls),
        (100, 0, 50, min(50, calls) if calls < 101 else calls),
        *DEV[2:4],
        (100, 0, 0, 105),
        DEV[5],
    ]
    data = data_set(
        recorded(TEST, "test"), Outcome(CANDIDATES, COST_TABLE, [recorded(dev)]).chosen()
    )
    speeds = dict(zip(("few", "many"), speeds_of(TEST, "10"), strict=False))
    head = next(
        winner for winner in data.winners if winner.family == "head" and winner.ratio == "10"
    )
    assert head.over_headless.value == pytest.approx(head.speedup.value / speeds.get(over, 1.0))


def test_intervals_resample_the_same_prompts_for_all_rules():
    """Where all rules are slow on the same prompts, a gain varies less than the speeds that it is
    made of.
    """
    outcome = Outcome(CANDIDATES, COST_TABLE, [recorded(DEV)]).chosen()
    data = data_set(recorded(TEST, "test", noise=0.2), outcome)
    head = next(
        winner for winner in data.winners if winner.family == "head" and winner.ratio == "10"
    )
    assert head.speedup.low < head.speedup.value < head.speedup.high
    assert head.gain.high - head.gain.low < 1e-9


def test_intervals_resample_groups():
    """Where prompts of a file are equally slow, twice as many of each make no interval narrower."""
    outcome = Outcome(CANDIDATES, COST_TABLE, [recorded(DEV)]).chosen()
    once = recorded(TEST, "test", noise=0.2)
    recording = SimpleNamespace(
        **vars(once.recording)
        | {
            "num_prompts": 2 * NUM_PROMPTS,
            "lengths": torch.full((2 * NUM_PROMPTS,), 100),
        }
    )
    counts = [
        Counts(*(np.repeat(column, 2, axis=0) for column in vars(counts).values()))
        for counts in once.counts
    ]
    twice = replace(once, recording=recording, groups=range(2 * NUM_PROMPTS), counts=counts)
    grouped = replace(twice, groups=[f"file{number // 2}" for number in range(2 * NUM_PROMPTS)])

    def width(some):
        speedup = next(
            row for row in data_set(some, outcome).winners if row.family == "head"
        ).speedup
        return speedup.high - speedup.low

    assert width(grouped) == pytest.approx(width(once), rel=1e-9) and width(twice) < 0.85 * width(
        once
    )


def test_without_a_ceiling_there_is_no_gap_to_it():
    some = [number for number, rule in enumerate(CANDIDATES) if rule.family != CEILING]
    dev, test = ([counts[number] for number in some[:-1]] for counts in (DEV, TEST))
    outcome = Outcome([CANDIDATES[number] for number in some], COST_TABLE, [recorded(dev)]).chosen()
    winners = data_set(recorded(test, "test"), outcome).winners
    assert {winner.gap_ceiling for winner in winners} == {None}


def test_where_the_ceiling_is_hardly_faster_no_share_of_the_gap_is_reported():
    fixed = np.array([1.0, 0.9, 1.1])
    ours = np.array([1.2, 1.1, 1.3])
    for ceiling in (
        fixed,
        fixed * 1.009,
        fixed - 0.1,
        fixed * [1.2, 1.2, 0.8],
    ):  # nothing pays, or it is not sure that it does
        assert _gap(ours, fixed, ceiling) is None
    assert _gap(ours, fixed, None) is None
    assert _gap(2 * ours, 2 * fixed, 2 * fixed * 1.009) is None
    clear = _gap(ours, fixed, fixed * 1.4)
    assert clear.value == pytest.approx(0.5) and 0 < clear.low <= clear.high < 1


def test_a_resample_without_a_gap_gives_a_large_share_but_no_infinite_one():
    """In one of 40 resamples the ceiling is the fixed length itself: the gap counts as a thousandth
    of that.
    """
    fixed = np.full(41, 2.0)
    ours = np.full(41, 2.5)
    ceiling = np.full(41, 3.0)
    ceiling[40] = 2.0
    found = _gap(ours, fixed, ceiling)
    assert (found.value, found.low) == (0.5, 0.5) and found.high == pytest.approx(
        0.5 + 0.025 * (0.5 / 0.002 - 0.5)
    )


@pytest.fixture
def recording():
    """Two responses, `abcd` and `ef`; at c the draft proposed `xyz`, at e `w`.

    One acceptance sample.
    """
    accepted = torch.tensor([[True, True, False, True, False, True]])
    branch_first = torch.zeros(1, 6, dtype=torch.long)
    branch_length = torch.zeros(1, 6, dtype=torch.long)
    branch_first[0, 2] = 6
    branch_length[0, 2] = 3
    branch_first[0, 4] = 9
    branch_length[0, 4] = 1
    tokens = torch.tensor([0, 1, 2, 3, 4, 5, 23, 24, 25, 22])
    values = {"draft_prob": torch.linspace(0.1, 0.9, 10), "max_prob": torch.linspace(0.5, 0.9, 10)}
    first = torch.tensor([0, 4])
    lengths = torch.tensor([4, 2])
    finished = torch.tensor([False, False])
    return Recording(
        [[7], [8]],
        first,
        lengths,
        lengths + 5,
        finished,
        accepted,
        branch_first,
        branch_length,
        tokens,
        values,
        3,
    )


class Letters:
    def decode(self, ids):
        return "".join(chr(97 + int(i)) for i in ids)


def test_a_response_is_shown_as_its_rounds_made_it(recording):
    rounds = Replayed(
        *map(
            np.array,
            ([0, 0, 1, 1], [0] * 4, [0, 3, 0, 1], [4, 0, 1, 0], [2, 0, 0, 0], [3, 1, 1, 1]),
        )
    )
    samples = text_samples(Letters(), recording, CANDIDATES[0], rounds)
    assert [(sample.prompt, sample.rule) for sample in samples] == [("h", "few"), ("i", "few")]
    assert samples[0].pieces == [
        ("accepted", "ab"),
        ("rejected", "xy"),
        ("target", "c"),
        ("target", "d"),
    ]
    assert samples[1].pieces == [("rejected", "w"), ("target", "e"), ("target", "f")]


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
        assert np.dot(curves[name].share, curves[name].predicted) == pytest.approx(
            torch.sigmoid(values).mean().item()
        )


class Given(Outcome):
    """An outcome whose cost table is its speeds."""

    def _resampled(self, table, ratio):
        return {name: np.array(values) for name, values in table.items()}


def ends_of(*ends):
    names = ("target alone", "a", "b")
    return Given(
        [], SimpleNamespace(ends=[dict(zip(names, speeds, strict=True)) for speeds in ends])
    )


def test_a_setting_stands_until_another_one_is_faster_by_more_than_a_tie():
    """By the estimates, which come first, and at each end of the costs."""
    outcome = ends_of(
        ([1, 1], [0.98, 9], [1, 8]), ([1, 1], [0.979, 9], [1, 8]), ([1, 1], [2, 0], [1, 8])
    )
    assert outcome.stands("a") == [True, False, True] and outcome.stands("b") == [True, True, False]


def test_the_middle_choice_holds_at_the_ends_where_it_stands():
    fast = [1.5] * 3
    hardly = [1.48] * 3
    slow = [1.2] * 3
    one = [1.0] * 3
    assert ends_of((one, hardly, fast), (one, fast, slow), (one, slow, fast)).choices == [
        "a",
        "a",
        "b",
    ]
    assert ends_of((one, slow, fast), (one, fast, slow), (one, fast, slow)).choices == [
        "b",
        "a",
        "a",
    ]
    assert ends_of().choices == []


def test_dev_prompts_choose_among_what_a_decoder_can_use():
    """Neither a bound, nor a rule for another ratio, nor what is fastest on the reported
    prompts.
    """
    rules = [
        candidate(FIXED, "few"),
        candidate("b", "lucky"),
        candidate("c", "for ten", "10"),
        replace(candidate("d", "bound"), live=None),
    ]
    dev = [(100, 60, 50, 50), (100, 60, 45, 55), (100, 10, 75, 25), (100, 0, 90, 10)]
    test = [dev[1], (100, 0, 80, 20), *dev[2:]]
    sets = [recorded(dev, noise=0.01), recorded(test, "test", noise=0.01)]
    sets = [replace(each, counts=each.counts[:-1]) for each in sets]
    outcome = Outcome(rules, COST_TABLE, sets).chosen()
    assert outcome.uses == {MEASURED: "few", "10": "for ten"}
    tried = {"target alone": np.ones(9), "lucky": np.full(9, 2.0)}
    assert replace(outcome, tried=tried).uses == {MEASURED: "lucky", "10": "for ten"}
    assert replace(outcome, tried=tried, doubts=["Busy."]).uses == outcome.uses
    # A head must be clearly faster than what needs none, whether it was replayed or only decoded.
    tried = {
        "target alone": np.ones(9),
        "few": np.full(9, 2.0),
        "lucky": np.array([2.1, *[1.9, 2.3] * 4]),
    }
    assert replace(outcome, tried=tried).uses[MEASURED] == "lucky"
    head = replace(rules[1], head="mine")
    assert replace(outcome, tried=tried, measured=[Measured(head)]).uses[MEASURED] == "few"
    assert (
        replace(outcome, tried=tried, candidates=[rules[0], head, *rules[2:]]).uses[MEASURED]
        == "few"
    )


def test_of_two_that_are_as_fast_the_first_is_chosen():
    rules = [candidate(FIXED, "first"), candidate(FIXED, "second")]
    sets = [recorded([DEV[0], DEV[0]])]
    outcome = Outcome(rules, COST_TABLE, [replace(sets[0], counts=sets[0].counts[:2])]).chosen()
    assert outcome.best["10"] == {FIXED: 0}


def test_counts_of_other_candidates_are_refused():
    outcome = Outcome(CANDIDATES, COST_TABLE, [recorded(DEV)]).chosen()
    fewer = replace(outcome, candidates=CANDIDATES[1:])
    for use in (fewer.chosen, lambda: fewer.uses, lambda: data_set(recorded(TEST, "test"), fewer)):
        with pytest.raises(ValueError, match="argument"):
            use()


def test_without_costs_of_draft_steps_a_choice_stands_on_nothing():
    table = CostTable({MEASURED: StepCosts(0.001, 0.003)})
    assert (
        basis_of(Outcome([], table))
        is basis_of(Outcome([], replace(table, fit=CostFit(StepCosts(0.0, 0.003)))))
        is None
    )
    known = replace(table, fit=CostFit(table.costs[MEASURED]))
    assert basis_of(Outcome([], known)) == Basis(ROUNDS, Interval(*[pytest.approx(3)] * 3))


def test_intervals_of_a_set_are_over_its_groups():
    one = replace(recorded(DEV), groups=["only"] * NUM_PROMPTS)
    assert (one.resamples == 1).all()


def test_the_main_ratio_is_the_measured_one_or_the_middle():
    best = [
        {key: {} for key in ratios}
        for ratios in (("5", MEASURED, "10"), ("5", "10", "20"), ("5", "10"))
    ]
    assert [Outcome([], COST_TABLE, best=each).main_ratio for each in best] == [
        MEASURED,
        "10",
        "10",
    ]


def test_a_given_threshold_is_recommended_before_the_automatic_one():
    def of(head, automatic, live=None, bound=False):
        return replace(
            candidate("head", "x", head=head),
            live=live or THRESHOLD,
            automatic=automatic,
            bound=bound,
        )

    rules = [
        of("mine", True),
        of("mine", False),
        of("other", False),
        of("mine", False, RULE),
        of("mine", False, bound=True),
        of("late", True),
    ]
    best = {"10": {str(number): number for number in (0, 3, 1, 2, 4, 5)}}
    outcome = Outcome(rules, COST_TABLE, best=best)
    assert [outcome.best_threshold(head, "10") for head in ("mine", "other", "late", "none")] == [
        1,
        2,
        5,
        None,
    ]
    assert outcome.achievable("10") == [0, 3, 1, 2, 5]


def test_the_survival_of_a_draft_is_a_product_of_shares(monkeypatch):
    """Of drafts with 3, 1, 3 and 1 tokens 3, 0, 1 and 1 were accepted: 3 of 4 first tokens, 1 of 2
    second ones, the third one.
    """
    columns = np.array([3, 1, 3, 1]), np.array([3, 0, 1, 1])
    monkeypatch.setattr(
        replayed_sets, "replay", lambda recording, rules: [Replayed(*[None] * 3, *columns, None)]
    )
    assert survival(None, 4) == pytest.approx([0.75, 0.375, 0.375, 0])


@pytest.fixture(scope="module")
def small():
    return random_recording(num_prompts=4, num_samples=1, max_tokens=4, longest=12)


def counts(of):
    return [column.tolist() for column in vars(of).values()]


def test_candidates_are_counted_in_their_order_and_the_oracle_among_them(small):
    rules = [
        stopping.FixedLength(1),
        None,
        stopping.MaxProbability(0.5, 4),
        stopping.FixedLength(3),
        stopping.FixedLength(1),
    ]
    given = [Candidate("a", "a", rule, rule) for rule in rules]
    expected = [
        (oracle(small) if rule is None else replay(small, [rule])[0]).per_prompt(4)
        for rule in rules
    ]
    done = []
    found = counts_of(small, given, done.append)
    assert (
        [counts(each) for each in found] == [counts(each) for each in expected]
        and sum(done) == 5
        and len(done) > 2
    )
    assert [counts(each) for each in counts_of(small, given)] == [counts(each) for each in expected]
    sets = [RecordedSet(name, "dev", small, range(4)) for name in "ab"]
    for replayed in replay_all(sets, given):
        assert [counts(each) for each in replayed.counts] == [counts(each) for each in expected]


def test_replay_shows_how_many_candidates_are_done(small, monkeypatch):
    shown = []

    @contextmanager
    def progress(name, total):
        shown.append((name, total, []))
        yield shown[-1][2].append

    monkeypatch.setattr(replayed_sets, "progress", progress)
    replay_all([RecordedSet(name, "dev", small, range(4)) for name in "ab"], CANDIDATES)
    ((name, total, steps),) = shown
    assert name == "replaying" and total == sum(steps) == 2 * len(CANDIDATES)


def test_an_evaluation_records_drafts_that_are_long_enough_for_every_rule(monkeypatch):
    made = {}

    def recorded_by(recorder, sets, heads, ground_truth):
        made.update(recorder=recorder, sets=sets, heads=heads, ground_truth=ground_truth)
        return {name: f"recording of {name}" for name in sets}

    monkeypatch.setattr(replayed_sets, "Recorder", lambda *values: values)
    monkeypatch.setattr(replayed_sets, "record_sets", recorded_by)
    settings = Evaluation(
        max_new_tokens=7, seed=3, record=RecordingSettings(num_samples=5, ground_truth=False)
    )
    prompt_sets = {
        role: SimpleNamespace(prompts=[role], role=role, groups=f"groups of {role}")
        for role in ("dev", "test")
    }
    setup = SimpleNamespace(
        settings=settings,
        pair="pair",
        heads={"mine": "head"},
        data_folder="data",
        prompts=SimpleNamespace(recorded=prompt_sets),
        prompt_data=SimpleNamespace(limits=ResponseLimits(99, 11)),
        rules={"short": RuleChoice(stopping.FixedLength, {"num_tokens": [3, 5]})},
    )
    assert record(setup) == [
        RecordedSet(role, role, f"recording of {role}", f"groups of {role}") for role in prompt_sets
    ]
    limits = ResponseLimits(7, 11)
    assert made["recorder"] == (
        "pair",
        settings.warp,
        limits,
        RecordSettings(5, stopping.MAX_TOKENS),
        3,
        "data",
    )
    assert (
        made["sets"] == {"dev": ["dev"], "test": ["test"]}
        and made["heads"] == ["head"]
        and made["ground_truth"] is False
    )
    setup.rules["long"] = RuleChoice(
        stopping.FixedLength, {"num_tokens": [stopping.MAX_TOKENS + 4, 2]}
    )
    record(setup)
    assert made["recorder"][3].max_tokens == stopping.MAX_TOKENS + 4


def of_six_prompts(pair, folder):
    prompts = [(Prompt(str(number), "dev", "a"), [number, 1]) for number in range(6)]
    settings = RecordSettings(num_samples=2, max_tokens=8)
    return load_recording(
        Recorder(pair, Warp(), ResponseLimits(12), settings, 0, folder).record([prompts])[0]
    )


def test_the_survival_of_drafts_is_that_of_dev_prompts(tmp_path):
    assert (
        survival(of_six_prompts(tiny_pair(7, scale=2.0, same=True), tmp_path / "same"), 5)
        == [1.0] * 5
    )
    shares = survival(of_six_prompts(tiny_pair(7, scale=2.0), tmp_path / "other"), 8)
    assert len(shares) == 8 and shares == sorted(shares, reverse=True) and 0 < shares[0] < 1
