"""What a report concludes: the setting to use, what that rests on, and what to know besides."""

from dataclasses import replace

import pytest

from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import StepTimes
from specheads.evaluation.answer import answer_of, main_data_set, preferred, ratios_of
from specheads.evaluation.candidates import FIXED
from specheads.evaluation.conclusions import (
    changes_text,
    decoded_texts,
    disagreement_text,
    doubt_text,
    evidence_text,
    first_ratio,
    ratio_text,
    tie_text,
    use_text,
    used_at,
    warnings_of,
)
from specheads.evaluation.keys import MEASURED, Kind
from specheads.evaluation.report import (
    BatchRow,
    BatchTable,
    DataSet,
    LiveRow,
    Report,
    RuleRow,
    Winner,
)
from specheads.evaluation.tables import batch_table
from specheads.replay.intervals import Interval

LEVELS = {"p50": 1.0, "p90": 1.0, "p99": 1.0}


@pytest.mark.parametrize(("fast", "marked"), [(150, "K=3"), (80, "target alone")])
def test_of_a_batch_the_fastest_setting_that_keeps_the_distribution_is_marked(fast, marked):
    settings = [
        ("target alone", 100.0, True),
        ("K=3", fast, True),
        ("head", 98.0, True),
        ("TETRIS", 500.0, False),
    ]
    rows = [
        BatchRow(
            name, name, lossless, speed, speed / 100, 1.0, Interval(1, 1, 1), LEVELS, LEVELS, 1.0
        )
        for name, speed, lossless in settings
    ]
    for doubts in ([], ["busy"]):  # of untrusted times none is the best
        table = batch_table(Report({}, None, doubts), BatchTable(1, 8, rows))
        tags = {row[0].text: row[0].tag for row in table.rows}
        assert tags.pop("TETRIS") == "lossy"
        assert [name for name, tag in tags.items() if tag] == ([] if doubts else [marked])


def live(name, family, speed):
    """A setting that was decoded, `speed` times as fast as the target alone."""
    values = (
        Interval(100 * speed, 90 * speed, 110 * speed),
        Interval(speed, speed - 0.1, speed + 0.1),
    )
    rates = Interval(0, 0, 0), Interval(1, 1, 1)
    head = "mine" if family == "head_threshold" else None
    given = {"lossless": True, "head": head, "rule_name": family}
    return LiveRow(name, family, *values, *rates, 1.0, None, LEVELS, None, **given)


LIVE = [
    live("target alone", "target", 1.0),
    live("fixed_length(num_tokens=3)", "fixed_length", 1.5),
    live("head 0.4", "head_threshold", 1.4),
]


REPLAYED = (("fixed_length", None, 1.5), ("head_threshold", "mine", 1.6))
CONTEXT = {"num_live_prompts": 4, "device": "some CPU, 2 threads, AVX2", "split": "final"}


def answered(use, costs="10", live=(), doubts=(), known=None, disagreements=()):
    """The answer on replayed settings, of which dev prompts chose one."""
    winners = [winner(name, speed, head, costs) for name, head, speed in REPLAYED]
    sets = sets_of("test", winners=winners)
    report = Report(
        CONTEXT, MACHINE, doubts, list(live), sets, ratio=known, disagreements=disagreements
    )
    return answer_of(report, {costs: use}, 9)


def test_the_speed_of_the_setting_to_use_is_said():
    answer = answered("head_threshold")
    assert answer.kind == Kind.HEAD and not answer.is_tie
    assert tie_text(answer.comparison) is None
    assert use_text(answer.comparison) == (
        "1.60× [1.50,\u00a01.70] the target alone, +2.0\u00a0% [+1.0,\u00a0+3.0] over the best"
        " fixed length."
    )


def test_a_tie_says_which_was_the_fastest_and_why_it_is_not_used():
    answer = answered("fixed_length")
    assert answer.is_tie and answer.setting == "fixed_length"
    assert tie_text(answer.comparison) == (
        "A tie, so the simplest: head_threshold was the fastest on dev prompts, but not clearly"
        " faster than fixed_length; on these prompts it is +2.0\u00a0% [+1.0,\u00a0+3.0] against"
        " that."
    )
    alone = answered("target alone")
    assert use_text(alone.comparison) == "No setting is clearly faster than the target alone."
    assert "it is +60.0\u00a0% [+50.0,\u00a0+70.0] against" in tie_text(alone.comparison)


def test_what_an_answer_rests_on_is_said():
    alone = answer_of(Report(CONTEXT, None, live=LIVE), {})
    assert evidence_text(alone) == (
        "Decoded on 4 prompts on some CPU, 2 threads, AVX2, and chosen on these same prompts."
    )
    assert decoded_texts(alone) == []
    assert evidence_text(answered("fixed_length")) == (
        "Replayed on 7 prompts of set 0, chosen on 9 dev prompts; costs are counted at cost ratio"
        " 10, not timed."
    )
    timed = answered("fixed_length", MEASURED, known=Interval(5.5, 5.0, 6.04))
    assert evidence_text(timed) == (
        "Replayed on 7 prompts of set 0, chosen on 9 dev prompts; as timed on some CPU, 2 threads,"
        " AVX2, a forward pass of the target costs 5.5 draft steps [5.0, 6.0]."
    )


def test_decoding_is_said_next_to_the_prediction_and_disagreement_by_itself():
    under_block = replace(
        live("head_threshold verification=block", "block", 1.45),
        verification="block",
        same_rule="head_threshold",
        over_same_rule=Interval(1.06, 1.02, 1.1),
    )
    head = replace(live("head_threshold", "head_threshold", 1.4), replayed_tokens_per_second=147.0)
    given = {"live": [*LIVE[:2], head, under_block], "known": Interval(5.5, 5.0, 6.04)}
    answer = answered("head_threshold", MEASURED, doubts=["It was busy.", "Too few."], **given)
    speed, block = decoded_texts(answer)
    assert speed == (
        "Decoded as a check: 140 tokens/s, 1.40× [1.30,\u00a01.50] the target alone; predicted"
        " tokens per second were +5.0\u00a0% off."
    )
    assert block == (
        "Under block verification, its decoded rounds are +6.0\u00a0% [+2.0,\u00a0+10.0] faster."
    )
    assert doubt_text(answer) == "Timing unreliable here: it was busy."
    assert disagreement_text(answer) is None
    other = answered("head_threshold", MEASURED, disagreements=["a 1", "b 2"], **given)
    assert disagreement_text(other) == (
        "Replay and decoding disagree: a 1; b 2. The answer rests on replay; num_live_prompts="
        " decodes more prompts."
    )
    busy = replace(other, doubts=["It was busy."])
    assert disagreement_text(busy).endswith("busy; decode again on a quiet one.")
    assert doubt_text(other) is None


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.70, 0.80, True), (0.85, 0.95, False), (1.05, 1.3, False), (1.2, 1.4, True)],
)
@pytest.mark.parametrize("family", ["head_threshold", "logistic"])
def test_predictions_that_do_not_hold_are_named_with_the_remedy(low, high, said, family):
    row = replace(
        live("mine", family, 1.4), accepted_over_expected=Interval((low + high) / 2, low, high)
    )
    for doubts in ([], ["busy"]):  # no times decide it
        report = Report({}, None, live=[LIVE[0], row], doubts=doubts)
        texts = [text for text in warnings_of(report) if "mine expected to be accepted" in text]
        assert len(texts) == said
        assert not said or ("calibrate=true" in texts[0]) == (family == "head_threshold")


def winner(family, speed, head=None, ratio="10", **values):
    """The best rule of a family at a ratio, which gains 2 % over a fixed length."""
    speedup = Interval(speed, speed - 0.1, speed + 0.1)
    gain = Interval(1.02, 1.01, 1.03)
    return Winner(
        family,
        family,
        ratio,
        speedup,
        gain,
        None,
        speed,
        head=head,
        rule_name=family,
        over_headless=gain,
        **values,
    )


def replayed(*winners, uses):
    report = Report({}, None, data_sets=[DataSet("prompts", "test", 1, 1, 1, [], list(winners))])
    return replace(report, answer=answer_of(report, uses))


@pytest.mark.parametrize(
    ("at_20", "said"),
    [("head", "no: at 20 it is the head, too"), (FIXED, "yes: at 20 the best fixed length")],
)
def test_another_ratio_changes_the_winner_or_does_not(at_20, said):
    rows = [
        winner(name, 1.5, head, ratio)
        for ratio in ("10", "20")
        for name, head in ((FIXED, None), ("head", "mine"))
    ]
    report = replayed(*rows, uses={"10": "head", "20": at_20})
    assert report.answer.kind == Kind.HEAD and changes_text(report, report.answer) == said
    assert used_at(report, "10") == "head" and used_at(report, "20") == at_20
    assert use_text(report.answer.comparison).endswith(
        "+2.0\u00a0% [+1.0,\u00a0+3.0] over the best fixed length."
    )


def test_a_bound_is_no_choice():
    rows = [winner(FIXED, 1.2), replace(winner("ceiling", 1.9), bound=True)]
    answer = replayed(*rows, uses={"10": FIXED}).answer.comparison
    assert set(answer.choices) == {Kind.ALONE, Kind.FIXED} and answer.choices[
        Kind.ALONE
    ].gain.value == pytest.approx(1 / 1.2)


def test_a_gain_that_is_none_is_said_in_words():
    rows = [replace(winner("head", 1.1, "mine"), gain=Interval(0.9, 0.8, 0.99)), winner(FIXED, 1.2)]
    text = use_text(replayed(*rows, uses={"10": "head"}).answer.comparison)
    assert "no gain: −10.0\u00a0% [−20.0,\u00a0−1.0] over the best fixed length" in text


def sets_of(*roles, winners=(), rules=()):
    return [
        DataSet(f"set {number}", role, 7, 1, 1, list(rules), list(winners))
        for number, role in enumerate(roles)
    ]


MACHINE = StepTimes(StepCosts(0.002, 0.011))


def test_the_measured_ratio_comes_first():
    rule = RuleRow(
        "a", "a", Interval(0, 0, 0), Interval(1, 1, 1), 1.0, None, {"5": Interval(1, 1, 1)}
    )
    winners = [winner(FIXED, 1.5, ratio=ratio) for ratio in ("20", MEASURED, "10")]
    dev = sets_of("dev", winners=[winner(FIXED, 1.5, ratio="2")])
    sets = dev + sets_of("test", winners=winners, rules=[rule])
    report = Report({}, MACHINE, data_sets=sets, ratio=Interval(5.5, 5.0, 6.0))
    assert ratios_of(report) == [MEASURED, "2", "5", "10", "20"] and first_ratio(report) == MEASURED
    assert [ratio_text(report, ratio) for ratio in (MEASURED, "10")] == ["5.5 (measured)", "10"]
    answer = answer_of(report, {})
    other = next(each for each in answer.others if each.ratio == "20")
    assert first_ratio(replace(report, answer=replace(answer, comparison=other))) == "20"


def test_the_ratio_to_begin_with_is_the_measured_one_or_ten():
    found = [preferred(ratios) for ratios in ([MEASURED, "10"], ["5", "10"], ["5", "20"], [])]
    assert found == [MEASURED, "10", "5", None]


def test_a_reader_sees_test_prompts_first():
    found = [
        main_data_set(Report({}, None, data_sets=sets_of(*roles)))
        for roles in ([], ["dev"], ["dev", "test", "test"])
    ]
    assert found == [None, 0, 1]
    assert answer_of(Report({}, None), {}) is None
