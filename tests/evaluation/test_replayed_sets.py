"""The choice of rules, and their distance from the bounds, on counts made by hand and on a small recording."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import tiny_pair

from specheads import Warp, stopping
from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.evaluation.candidates import CEILING, FIXED, ORACLE, ORACLE_BOUND, Candidate, CostTable
from specheads.evaluation.replayed_sets import Outcome, RecordedSet, survival
from specheads.evaluation.report import MEASURED
from specheads.evaluation.rows import _gap, data_set, reliability, text_samples
from specheads.heads.metrics import calibration
from specheads.prompts.prompt import Prompt, ResponseLimits
from specheads.replay.cost import CostFit
from specheads.replay.recording import Recorder, Recording, load_recording
from specheads.replay.replay import Counts, RecordedHead, Replayed
from specheads.replay.response_tree import RecordSettings

NUM_PROMPTS = 20
RULE = stopping.FixedLength(2)


def candidate(family, name, ratio=None, head=None):
    return Candidate(family, name, RULE, RULE, {"number": 1}, ratio, rule_name=family, head=head, bound=family == CEILING)


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
DEV = [(100, 60, 50, 50), (100, 200, 60, 40), (100, 70, 55, 45), (100, 160, 65, 35), (100, 60, 55, 45), (100, 80, 65, 35)]
TEST = [(100, 60, 45, 55), (100, 150, 62, 38), (100, 70, 55, 45), (100, 160, 62, 38), (100, 60, 50, 50), (100, 75, 65, 35)]
LAST = (100, 70, 70, 30)  # the oracle
SHARE, STEP = 0.2, 0.0003  # what a head adds to a draft step: as a share at the ratios, in seconds as measured
COST_TABLE = CostTable(
    {MEASURED: StepCosts(0.001, 0.003), "10": StepCosts.at_ratio(10)}, {"mine": SHARE}, measured_heads={"mine": STEP}, alone=400.0
)
FREE = replace(COST_TABLE, head_shares={}, measured_heads={})


def recorded(table, role="dev", noise=0.0):
    rng = np.random.default_rng(0)
    scale = 1 + noise * rng.standard_normal(NUM_PROMPTS)
    recording = SimpleNamespace(num_prompts=NUM_PROMPTS, lengths=torch.full((NUM_PROMPTS,), 100), num_samples=1)
    counts = [
        Counts(np.full(NUM_PROMPTS, float(t)), d * scale, float(a) * scale, (c * scale)[:, None]) for t, d, a, c in [*table, LAST]
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
    assert best[FIXED] == max((0, 1), key=speeds.__getitem__) and best["head"] == max((2, 3), key=speeds.__getitem__)
    assert ("other" in best) == (ratio == "10")
    assert best[ORACLE] == len(CANDIDATES) - 1
    assert outcome.main_ratio == MEASURED


@pytest.mark.parametrize("ratio", [MEASURED, "10"])
def test_winners_are_reported_on_other_prompts(ratio):
    outcome = Outcome(CANDIDATES, COST_TABLE, [recorded(DEV)]).chosen()
    data = data_set(recorded(TEST, "test"), outcome)
    winners = {winner.family: winner for winner in data.winners if winner.ratio == ratio}
    speeds = speeds_of(TEST, ratio)
    best, dev_speeds = outcome.best[ratio], outcome.speeds[ratio]
    fixed, ours, ceiling = (speeds[best[family]] for family in (FIXED, "head", CEILING))
    unaided = max((best[family] for family in (FIXED, "other") if family in best), key=dev_speeds.__getitem__)
    head = winners["head"]
    assert head.speedup.value == head.speedup.low == pytest.approx(ours)
    assert head.gain.value == pytest.approx(ours / fixed)
    assert head.gap_ceiling.value == pytest.approx((ours - fixed) / (ceiling - fixed))
    assert head.over_headless.value == pytest.approx(ours / (speeds[unaided] if dev_speeds[unaided] > 1 else 1.0))
    assert winners[FIXED].gap_ceiling.value == 0 and winners[CEILING].gap_ceiling.value == pytest.approx(1)


@pytest.mark.parametrize(("ratio", "share"), [(MEASURED, STEP / 0.001), ("10", SHARE)])
def test_a_head_pays_its_share_and_gains_more_without(ratio, share):
    outcome, table = Outcome(CANDIDATES, COST_TABLE, [recorded(DEV)]).chosen(), recorded(TEST, "test", noise=0.1)
    winners = {winner.family: winner for winner in data_set(table, outcome).winners if winner.ratio == ratio}
    head, fixed = winners["head"], winners[FIXED]
    assert head.head_share == pytest.approx(share) and fixed.head_share is fixed.gain_uncharged is fixed.over_headless is None
    free = data_set(table, replace(outcome, cost_table=FREE)).winners
    without = next(winner for winner in free if (winner.family, winner.ratio) == ("head", ratio))
    assert head.gain_uncharged.value == pytest.approx(without.gain.value) and without.gain.value > head.gain.value


def test_a_rule_whose_rounds_were_timed_pays_their_costs():
    rule, other = CANDIDATES[2:4]
    timed = replace(COST_TABLE, fit=CostFit(COST_TABLE.costs[MEASURED], {rule.kind: RuleCosts(0.0001, 0.0002)}))
    other = replace(other, rule=stopping.Confidence())
    assert rule.kind == "FixedLength of mine" and other.kind == "Confidence of mine"
    assert timed.of(rule, MEASURED) == StepCosts(0.0011, 0.003, round_seconds=0.0002)
    assert timed.of(other, MEASURED) == StepCosts(0.0013, 0.003)
    assert timed.of(rule, "10").draft_seconds == pytest.approx(0.1 * (1 + SHARE))
    assert timed.head_share(rule, MEASURED) == pytest.approx(0.1) and timed.of(ORACLE_BOUND, MEASURED) == timed.costs[MEASURED]


def test_without_a_draft_step_a_head_has_no_share_of_it():
    free = replace(COST_TABLE, costs={MEASURED: StepCosts(0.0, 0.003), "10": StepCosts.at_ratio(10)})
    rule = CANDIDATES[2]
    assert free.head_share(rule, MEASURED) is None and free.head_share(rule, "10") == pytest.approx(SHARE)


def test_rows_have_the_speed_ups_that_their_rule_is_meant_for():
    outcome = Outcome(CANDIDATES, COST_TABLE, [recorded(DEV)]).chosen()
    data = data_set(recorded(TEST, "test"), outcome)
    assert [row.name for row in data.rules] == [rule.name for rule in CANDIDATES]
    assert [set(row.speedup) for row in data.rules] == [{MEASURED, "10"}] * 4 + [{"10"}] + [{MEASURED, "10"}] * 2
    row = data.rules[1]
    assert row.discard_rate.value == pytest.approx(0.88) and row.verification_rate.value == pytest.approx(0.38)
    assert row.block_efficiency == pytest.approx(100 / 38) and row.acceptance_rate == pytest.approx(62 / 150)


def test_intervals_resample_the_same_prompts_for_all_rules():
    """Where all rules are slow on the same prompts, a gain varies less than the speeds that it is made of."""
    outcome = Outcome(CANDIDATES, COST_TABLE, [recorded(DEV)]).chosen()
    data = data_set(recorded(TEST, "test", noise=0.2), outcome)
    head = next(winner for winner in data.winners if winner.family == "head" and winner.ratio == "10")
    assert head.speedup.low < head.speedup.value < head.speedup.high
    assert head.gain.high - head.gain.low < 1e-9


def test_intervals_resample_groups():
    """Where prompts of a file are equally slow, twice as many of each make no interval narrower."""
    outcome, once = Outcome(CANDIDATES, COST_TABLE, [recorded(DEV)]).chosen(), recorded(TEST, "test", noise=0.2)
    recording = SimpleNamespace(
        **vars(once.recording) | {"num_prompts": 2 * NUM_PROMPTS, "lengths": torch.full((2 * NUM_PROMPTS,), 100)}
    )
    counts = [Counts(*(np.repeat(column, 2, axis=0) for column in vars(counts).values())) for counts in once.counts]
    twice = replace(once, recording=recording, groups=range(2 * NUM_PROMPTS), counts=counts)
    grouped = replace(twice, groups=[f"file{number // 2}" for number in range(2 * NUM_PROMPTS)])

    def width(some):
        speedup = next(row for row in data_set(some, outcome).winners if row.family == "head").speedup
        return speedup.high - speedup.low

    assert width(grouped) == pytest.approx(width(once), rel=1e-9) and width(twice) < 0.85 * width(once)


def test_without_a_ceiling_there_is_no_gap_to_it():
    some = [number for number, rule in enumerate(CANDIDATES) if rule.family != CEILING]
    dev, test = ([counts[number] for number in some[:-1]] for counts in (DEV, TEST))
    outcome = Outcome([CANDIDATES[number] for number in some], COST_TABLE, [recorded(dev)]).chosen()
    winners = data_set(recorded(test, "test"), outcome).winners
    assert {winner.gap_ceiling for winner in winners} == {None}


def test_where_the_ceiling_is_hardly_faster_no_share_of_the_gap_is_reported():
    fixed, ours = np.array([1.0, 0.9, 1.1]), np.array([1.2, 1.1, 1.3])
    for ceiling in (fixed, fixed * 1.009, fixed - 0.1, fixed * [1.2, 1.2, 0.8]):  # nothing pays, or it is not sure that it does
        assert _gap(ours, fixed, ceiling) is None
    assert _gap(ours, fixed, None) is None
    clear = _gap(ours, fixed, fixed * 1.4)
    assert clear.value == pytest.approx(0.5) and 0 < clear.low <= clear.high < 1


@pytest.fixture
def recording():
    """Two responses, `abcd` and `ef`; at c the draft proposed `xyz`, at e `w`. One acceptance sample."""
    accepted = torch.tensor([[True, True, False, True, False, True]])
    branch_first, branch_length = torch.zeros(1, 6, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long)
    branch_first[0, 2], branch_length[0, 2] = 6, 3
    branch_first[0, 4], branch_length[0, 4] = 9, 1
    tokens = torch.tensor([0, 1, 2, 3, 4, 5, 23, 24, 25, 22])
    values = {"draft_prob": torch.linspace(0.1, 0.9, 10), "max_prob": torch.linspace(0.5, 0.9, 10)}
    first, lengths = torch.tensor([0, 4]), torch.tensor([4, 2])
    finished = torch.tensor([False, False])
    return Recording([[7], [8]], first, lengths, lengths + 5, finished, accepted, branch_first, branch_length, tokens, values, 3)


class Letters:
    def decode(self, ids):
        return "".join(chr(97 + int(i)) for i in ids)


def test_a_response_is_shown_as_its_rounds_made_it(recording):
    rounds = Replayed(*map(np.array, ([0, 0, 1, 1], [0] * 4, [0, 3, 0, 1], [4, 0, 1, 0], [2, 0, 0, 0], [3, 1, 1, 1])))
    samples = text_samples(Letters(), recording, CANDIDATES[0], rounds)
    assert [sample.prompt for sample in samples] == ["h", "i"]
    assert samples[0].pieces == [("accepted", "ab"), ("rejected", "xy"), ("target", "c"), ("target", "d")]
    assert samples[1].pieces == [("rejected", "w"), ("target", "e"), ("target", "f")]


def test_reliability_is_over_drafted_tokens(recording):
    """There are six positions: four accepted tokens, and the two that were rejected in the place of c and e.

    b can also be the second token of a round, and the token that was rejected for c its second or third.
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
    ("predicts", "expected"), [("next_token", [0, 1, 6, 3, 9, 5, 1, 6, 6]), ("input_token", [1, 2, 7, 2, 7, 7])]
)
def test_a_calibrated_head_is_reported_raw_and_calibrated(recording, predicts, expected):
    """A head that predicts for its input token does so a node later: nothing follows d, nor the branch at e, nor f."""
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
        assert np.dot(curves[name].share, curves[name].predicted) == pytest.approx(torch.sigmoid(values).mean().item())


def of_six_prompts(pair, folder):
    prompts = [(Prompt(str(number), "dev", "a"), [number, 1]) for number in range(6)]
    settings = RecordSettings(num_samples=2, max_tokens=8)
    return load_recording(Recorder(pair, Warp(), ResponseLimits(12), settings, 0, folder).record([prompts])[0])


def test_the_survival_of_drafts_is_that_of_dev_prompts(tmp_path):
    assert survival(of_six_prompts(tiny_pair(7, scale=2.0, same=True), tmp_path / "same"), 5) == [1.0] * 5
    shares = survival(of_six_prompts(tiny_pair(7, scale=2.0), tmp_path / "other"), 8)
    assert len(shares) == 8 and shares == sorted(shares, reverse=True) and 0 < shares[0] < 1
