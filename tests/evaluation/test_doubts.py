"""A busy machine is noticed and still gets an answer, and a quiet one is not called busy."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specheads import AcceptanceHead, HeadConfig
from specheads.decoding.records import DecodeStats
from specheads.decoding.step_costs import RuleCosts, StepCosts
from specheads.decoding.step_times import StepTimes
from specheads.decoding.stopping import HeadThreshold
from specheads.evaluation import decode, reporting
from specheads.evaluation.candidates import TARGET_ALONE, Candidate, CostTable, fixed_length
from specheads.evaluation.conclusions import use_text, verdict_of
from specheads.evaluation.replayed_sets import Outcome, RecordedSet, basis_of
from specheads.evaluation.report import COUNTED, MEASURED, ROUNDS, STEPS, Basis, Report
from specheads.evaluation.rows import data_set
from specheads.evaluation.sweep import Measured, doubts_of, round_times, with_measured
from specheads.replay.cost import fit_costs
from specheads.replay.intervals import Interval
from specheads.replay.replay import Counts

NUM_PROMPTS = 16
TOKENS = 60
STEP = 0.001
PASS = 0.004


def decoded(k, slow, rng):
    """A fixed length (None: target alone) on prompts of various lengths.

    A share `slow` of its rounds is ten times as long.
    """
    prompts = []
    stats = []
    for prompt in range(NUM_PROMPTS):
        rows = []
        tokens = 0
        while tokens < TOKENS * (1 + prompt % 4) / 2:
            accepted = 0 if k is None else int(rng.integers(0, k + 1))
            busy = (1 + 9 * (rng.random() < slow)) * (1 + 0.05 * rng.standard_normal())
            rows.append(
                [
                    accepted + 1,
                    k or 0,
                    k or 0,
                    STEP * (k or 0) * busy,
                    (PASS + 0.0002 * (k or 0)) * busy,
                ]
            )
            tokens += accepted + 1
        prompts.append(rows)
        drafted = (k or 0) * len(rows)
        stats.append(
            DecodeStats(
                tokens, drafted, 0, drafted, len(rows), drafted, sum(r[3] + r[4] for r in rows), 0.0
            )
        )
    setting = TARGET_ALONE if k is None else fixed_length(k)
    return Measured(setting, stats, prompts)


def sweep(slow):
    rng = np.random.default_rng(0)
    return [decoded(k, slow, rng) for k in (None, 1, 2, 4)]


def fit_of(measured):
    return fit_costs(*round_times(measured))[0]


def doubts(slow, groups=range(NUM_PROMPTS)):
    measured = sweep(slow)
    return list(doubts_of(measured, fit_of(measured), groups))


def test_a_quiet_machine_raises_no_doubt():
    assert doubts(0.0) == []


def test_one_slow_round_in_ten_is_noticed():
    reason, *_ = doubts(0.1)
    assert "a step of the target alone took 2." in reason and "quiet machine" in reason


def test_other_processes_are_noticed():
    measured = sweep(0.0)

    def under(load):
        return list(
            doubts_of(
                [replace(measured[0], load=load), *measured[1:]],
                fit_of(measured),
                range(NUM_PROMPTS),
            )
        )

    (reason,) = under([(1.8, 3.0), (0.0, 1.0)])
    assert "other processes took 1.4 of its cores" in reason
    assert not under([(0.4, 1.0), (0.0, 9.0)])


def test_the_steps_of_the_target_alone_are_per_token():
    measured = sweep(0.0)[0]
    assert np.median(measured.pace) == pytest.approx(PASS, rel=0.02)


def test_prompts_whose_speeds_differ_are_no_doubt():
    """Intervals say it; it is no matter of the machine."""
    measured = sweep(0.0)
    slow = [
        replace(part, seconds=part.seconds * (1 + number % 2 * 3))
        for number, part in enumerate(measured[2].stats)
    ]
    measured[2] = replace(measured[2], stats=slow)
    assert not list(doubts_of(measured, fit_of(measured), range(NUM_PROMPTS)))


def test_prompts_of_few_files_are_a_doubt():
    """Resampling one file or two gives intervals of no width, however little they tell."""
    (reasons,) = doubts(0.0, groups=[number % 2 for number in range(NUM_PROMPTS)])
    assert "Only 2 independent prompts were decoded" in reasons


RULE = HeadThreshold(AcceptanceHead(HeadConfig(8, 0)), 0.5, max_tokens=8)
HEAD = Candidate("head_threshold", "head 0.5", RULE, RULE, rule_name="head_threshold", head="mine")
# With the tokens of a round and how many it drafts: which is best depends on a step's cost.
RULES = [(fixed_length(1), 1.9, 1), (fixed_length(6), 3.3, 6), (HEAD, 2.9, 3)]
SHARE = 0.1  # what the head adds to a draft step


def times_at(ratio):
    return StepTimes(StepCosts(PASS / ratio, PASS), {HEAD.kind: RuleCosts(SHARE * PASS / ratio)})


@pytest.fixture
def answer(monkeypatch, tmp_path):
    """What an evaluation with doubts answers and stores at these ratios of timed steps, and whether
    it has timed enough.
    """
    counts = [
        Counts(
            np.full(2, 100 * tokens),
            np.full(2, 100.0 * drafted),
            np.zeros(2),
            np.eye(7)[[drafted, drafted]] * 100,
        )
        for _, tokens, drafted in RULES
    ]
    recording = SimpleNamespace(num_prompts=2, lengths=torch.full((2,), 100), num_samples=1)
    stored = []
    enough = []
    setup = SimpleNamespace(
        pair=None,
        window=64,
        head_sizes={"mine": SHARE},
        counted_costs=lambda: CostTable({"10": StepCosts.at_ratio(10)}, {"mine": SHARE}),
        located_heads={"mine": SimpleNamespace(where=str(tmp_path))},
    )
    monkeypatch.setattr(decode, "_decoder", lambda setup: None)
    monkeypatch.setattr(decode, "_tuned_again", lambda setup, outcome, tuning: outcome)
    monkeypatch.setattr(decode, "counted_ratios", lambda pair: (4.0, 9.0))
    monkeypatch.setattr(
        reporting, "store_in_config", lambda folder, recommended: stored.append(recommended)
    )

    def run(low, middle, high):
        def timed(decoder, rules, context, patience, is_enough):
            ends = [times_at(ratio) for ratio in (high, middle, low)]
            assert rules == {HEAD.kind: RULE} and patience == 60
            enough.append(is_enough(ends))
            return ends

        monkeypatch.setattr(decode, "step_time_ends", timed)
        sets = [
            RecordedSet("set", role, recording, range(recording.num_prompts), counts)
            for role in ("dev", "test")
        ]
        measured = [*sweep(0.0)[:2], replace(sweep(0.0)[2], setting=HEAD)]
        outcome = Outcome(
            [rule for rule, *_ in RULES],
            setup.counted_costs(),
            sets,
            measured=measured,
            doubts=["It was busy."],
        )
        outcome = decode.settle_by_steps(setup, outcome, None)
        data = data_set(sets[1], outcome)
        basis = basis_of(outcome)
        sets = [replace(data, role="dev"), data]
        report = Report({}, outcome.cost_table.fit, outcome.doubts, [], sets, basis=basis)
        report = replace(report, verdict=verdict_of(report, outcome.uses))
        reporting.recommend(setup, outcome, report)
        return report, enough.pop(), stored

    return run


def used(report):
    answer = report.verdict.answer
    assert answer.ratio == MEASURED
    return answer.choices[answer.use].name


def test_a_busy_machine_with_a_clear_choice_gets_an_answer_and_a_threshold(answer):
    report, enough, (stored,) = answer(5, 7, 9)
    assert enough and used(report) == "head 0.5" and stored["threshold"] == 0.5
    assert stored["predicted_speedup"] == pytest.approx(2.9 / (1 + 3 * 1.1 / 7))
    assert report.basis == Basis(STEPS, Interval(*map(pytest.approx, (7, 5, 9))), ["head 0.5"] * 3)
    assert (
        "by step times a step of the target costs 7.0 draft steps [5.0, 9.0]"
        in report.verdict.rests_on
    )
    assert use_text(report.verdict.answer).startswith("1.97× [1.97,\u00a01.97] the target alone")
    assert report.verdict.doubt == "it was busy"


@pytest.mark.parametrize(
    ("ratios", "best"),
    [((1.4, 1.5, 1.6), "fixed_length(num_tokens=1)"), ((0.4, 0.5, 0.6), "target alone")],
)
def test_where_something_else_is_faster_the_head_recommends_nothing(answer, ratios, best):
    report, enough, stored = answer(*ratios)
    assert enough and used(report) == best and stored == [None]
    assert f"not clearly faster than {best}" in report.verdict.answer.skip_head


def test_settings_that_are_hardly_apart_are_one_choice(answer):
    """At 3.4 the fixed length is faster by a hundredth."""
    report, enough, stored = answer(3.4, 4, 5)
    assert enough and used(report) == "head 0.5" and len(stored) == 1


def test_where_the_choice_depends_on_the_costs_nothing_is_stored_and_it_says_so(answer, caplog):
    report, enough, stored = answer(2.6, 3.2, 4)
    fixed = "fixed_length(num_tokens=1)"
    assert (
        not enough
        and used(report) == fixed
        and not stored
        and "no threshold was stored" in caplog.text
    )
    assert report.basis.costs == STEPS and report.basis.choices == [fixed, fixed, "head 0.5"]
    assert (
        report.verdict.doubt
        == f"it was busy; at ratio 2.6 {fixed} is best; at ratio 4.0 head 0.5 is best"
    )


def test_where_timing_is_hopeless_costs_are_counted(answer):
    report, enough, (stored,) = answer(2.5, 7, 60)
    assert not enough and used(report) == "head 0.5" and stored["threshold"] == 0.5
    assert report.basis == Basis(
        COUNTED, Interval(*map(pytest.approx, (6, 4, 9))), ["head 0.5"] * 3
    )
    assert "Replayed at ratio 6.0 (counted)" in report.verdict.rests_on
    assert (
        "by counted costs a step of the target costs 6.0 draft steps [4.0, 9.0]"
        in report.verdict.rests_on
    )
    assert report.data_sets[1].winners[-1].head_share == pytest.approx(SHARE)


def test_a_quiet_machine_is_believed():
    """Its answer stands on the rounds, with the ratios of both halves of the responses."""
    measured = sweep(0.0)
    table = with_measured(CostTable({}), measured, {})
    basis = basis_of(Outcome([], table, measured=measured))
    halves = [each.costs[MEASURED].ratio for each in table.halves]
    assert (
        basis.costs == ROUNDS
        and basis.ratio.low == min(*halves, basis.ratio.value)
        and not basis.choices
    )
    assert basis.ratio.low <= basis.ratio.value <= basis.ratio.high < 1.1 * basis.ratio.low
