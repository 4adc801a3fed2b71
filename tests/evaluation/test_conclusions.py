"""What a report concludes: the setting to use, what that rests on, and what to know besides."""

from dataclasses import replace

import pytest

from specheads.decoding.step_costs import StepCosts
from specheads.decoding.step_times import StepTimes
from specheads.evaluation.candidates import FIXED
from specheads.evaluation.conclusions import (
    changes_text,
    faster_verification,
    fastest_by_kind,
    first_ratio,
    main_data_set,
    preferred,
    ratio_text,
    ratios_of,
    use_text,
    used_at,
    verdict_of,
    warnings_of,
    winners_at,
)
from specheads.evaluation.report import (
    MEASURED,
    BatchRow,
    BatchTable,
    ComparedSetting,
    DataSet,
    Kind,
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


REPLAYED = (("fixed_length", None, 1.5), ("head_threshold", "mine", 1.4))


def replayed_verdict(use, costs="10", live=(), doubts=(), known=None):
    """The verdict on replayed settings, of which dev prompts chose one."""
    winners = [winner(name, speed, head, costs) for name, head, speed in REPLAYED]
    sets = sets_of("test", winners=winners)
    report = Report({"num_live_prompts": 4}, MACHINE, doubts, list(live), sets, ratio=known)
    return verdict_of(report, {costs: use})


def test_the_setting_to_use_is_the_one_that_dev_prompts_chose():
    """On the reported prompts another one may be faster."""
    answer = replayed_verdict("head_threshold").answer
    assert answer.use == Kind.HEAD and answer.skip_head is None
    assert use_text(answer).startswith("1.40× [1.30,\u00a01.50] the target alone")


def test_where_nothing_is_clearly_faster_it_is_the_target_alone():
    answer = replayed_verdict("target alone").answer
    said = "No setting was clearly faster on dev prompts; here fixed_length is 1.50×"
    assert answer.use == Kind.ALONE and use_text(answer).startswith(said)


def test_a_head_is_skipped_where_dev_prompts_chose_what_needs_none():
    answer = replayed_verdict("fixed_length").answer
    assert answer.skip_head == (
        "on dev prompts it was not clearly faster than fixed_length; here it is"
        " +2.0\u00a0% [+1.0,\u00a0+3.0] against that"
    )
    assert "no rule is clearly faster than this fixed length" in use_text(answer)


def test_where_nothing_was_replayed_it_is_the_fastest_and_that_is_said():
    found = verdict_of(Report({"num_live_prompts": 4}, None, live=LIVE), {})
    assert found.answer.use == Kind.FIXED and not found.decoded
    assert found.rests_on == "Measured here on 4 prompts, the fastest of these same prompts."


DOUBTFUL = ["It was busy.", "Too few."]


@pytest.mark.parametrize("doubts", [(), DOUBTFUL])
def test_the_recording_decides_at_timed_steps_and_decoding_confirms(doubts):
    """The fixed length decoded faster than the head, which is used all the same."""
    under_block = replace(
        live("head_threshold verification=block", "block", 1.45),
        verification="block",
        same_rule="head_threshold",
        over_same_rule=Interval(1.06, 1.02, 1.1),
    )
    head = replace(live("head_threshold", "head_threshold", 1.4), replayed_tokens_per_second=147.0)
    known = Interval(5.5, 5.0, 6.04)
    decoded = [*LIVE[:2], head, under_block]
    found = replayed_verdict("head_threshold", MEASURED, decoded, doubts, known)
    assert found.answer.use == Kind.HEAD and found.answer.ratio == MEASURED
    assert found.rests_on == (
        "Replayed at ratio 5.5 (measured) on 7 prompts of set 0, chosen on dev prompts; as timed"
        " here, a step of the target costs 5.5 draft steps [5.0, 6.0]."
    )
    speed, block = found.decoded
    assert speed == (
        "Decoded on 4 of these prompts: 1.40× [1.30,\u00a01.50] the target alone; predicted tokens"
        " per second were +5.0\u00a0% off."
    )
    assert block == (
        "Under block verification, its decoded rounds are +6.0\u00a0% [+2.0,\u00a0+10.0] faster."
    )
    assert found.doubt == ("it was busy" if doubts else None)
    report = Report({}, None, live=[head, under_block])
    assert faster_verification(report, "head_threshold") is under_block
    slow = replace(under_block, over_same_rule=Interval(1.02, 0.99, 1.1))
    assert faster_verification(replace(report, live=[head, slow]), "head_threshold") is None


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
    return replace(report, verdict=verdict_of(report, uses))


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
    assert report.verdict.answer.use == Kind.HEAD and changes_text(report, report.verdict) == said
    assert used_at(report, "10") == "head" and used_at(report, "20") == at_20
    assert use_text(report.verdict.answer).endswith(
        "+2.0\u00a0% [+1.0,\u00a0+3.0] over the best fixed length."
    )


def test_a_bound_is_no_choice():
    rows = [winner(FIXED, 1.2), replace(winner("ceiling", 1.9), bound=True)]
    answer = replayed(*rows, uses={"10": FIXED}).verdict.answer
    assert set(answer.choices) == {Kind.ALONE, Kind.FIXED} and answer.choices[
        Kind.ALONE
    ].gain.value == pytest.approx(1 / 1.2)


def test_a_gain_that_is_none_is_said_in_words():
    rows = [replace(winner("head", 1.1, "mine"), gain=Interval(0.9, 0.8, 0.99)), winner(FIXED, 1.2)]
    text = use_text(replayed(*rows, uses={"10": "head"}).verdict.answer)
    assert "no gain: −10.0\u00a0% [−20.0,\u00a0−1.0] over the best fixed length" in text


def sets_of(*roles, winners=(), rules=()):
    return [
        DataSet(f"set {number}", role, 7, 1, 1, list(rules), list(winners))
        for number, role in enumerate(roles)
    ]


MACHINE = StepTimes(StepCosts(0.002, 0.011))


def test_the_measured_ratio_comes_first():
    rule = RuleRow(
        "a", "a", {}, Interval(0, 0, 0), Interval(1, 1, 1), 1.0, None, {"5": Interval(1, 1, 1)}
    )
    winners = [winner(FIXED, 1.5, ratio=ratio) for ratio in ("20", MEASURED, "10")]
    sets = sets_of("dev", "test", winners=winners, rules=[rule])
    report = Report({}, MACHINE, data_sets=sets, ratio=Interval(5.5, 5.0, 6.0))
    assert ratios_of(report) == [MEASURED, "5", "10", "20"] and first_ratio(report) == MEASURED
    assert [ratio_text(report, ratio) for ratio in (MEASURED, "10")] == ["5.5 (measured)", "10"]
    verdict = verdict_of(report, {})
    other = replace(verdict, answer=next(each for each in verdict.others if each.ratio == "20"))
    assert first_ratio(replace(report, verdict=other)) == "20"


def test_the_ratio_to_begin_with_is_the_measured_one_or_ten():
    found = [preferred(ratios) for ratios in ([MEASURED, "10"], ["5", "10"], ["5", "20"], [])]
    assert found == [MEASURED, "10", "5", None]


def test_a_reader_sees_test_prompts_first():
    found = [
        main_data_set(Report({}, None, data_sets=sets_of(*roles)))
        for roles in ([], ["dev"], ["dev", "test", "test"])
    ]
    assert found == [None, 0, 1]
    assert verdict_of(Report({}, None), {}) is None


def test_winners_are_in_the_order_of_dev_prompts_and_bounds_last():
    rows = [
        winner(name, speed) for name, speed in (("lucky", 1.9), ("best", 1.5), ("ceiling", 3.0))
    ]
    rows = [
        replace(row, dev_speedup=dev, bound=row.family == "ceiling")
        for row, dev in zip(rows, (1.2, 1.4, 2.9), strict=True)
    ]
    (data_set,) = sets_of("test", winners=[*rows, winner("elsewhere", 1.1, ratio="5")])
    assert [row.name for row in winners_at(data_set, "10")] == ["best", "lucky", "ceiling"]


def test_who_was_lucky_on_the_reported_prompts_is_not_the_fastest():
    """Of each kind the fastest on dev prompts, in their order.

    Neither bounds nor what changes the distribution.
    """
    rows = [
        (FIXED, 1.9, 1.2),
        (FIXED, 1.3, 1.3),
        ("logistic", 1.2, 1.5),
        ("head_threshold", 1.1, 1.4),
    ]
    bound = replace(winner("ceiling", 3.0), bound=True)
    replays = [
        replace(winner(name, here, "mine" if "head" in name else None), dev_speedup=dev)
        for name, here, dev in rows
    ]
    found = fastest_by_kind([bound, *replays])
    assert [(kind, row.dev_speedup) for kind, row in found.items()] == [
        (Kind.HEADLESS, 1.5),
        (Kind.HEAD, 1.4),
        (Kind.FIXED, 1.3),
    ]
    lossy = replace(live("lossy", "logistic", 3.0), lossless=False)
    assert list(fastest_by_kind([lossy, *LIVE])) == [Kind.FIXED, Kind.HEAD, Kind.ALONE]


def test_without_a_choice_on_dev_prompts_the_answer_is_the_fastest_there():
    rows = [
        replace(winner(name, here), dev_speedup=dev)
        for name, here, dev in ((FIXED, 1.9, 1.2), ("logistic", 1.1, 1.4))
    ]
    answer = verdict_of(Report({}, None, data_sets=sets_of("test", winners=rows)), {}).answer
    assert answer.use == Kind.HEADLESS and list(answer.choices) == [
        Kind.ALONE,
        Kind.FIXED,
        Kind.HEADLESS,
    ]
    slow = [replace(row, dev_speedup=row.dev_speedup - 0.5) for row in rows]
    assert (
        verdict_of(Report({}, None, data_sets=sets_of("test", winners=slow)), {}).answer.use
        == Kind.ALONE
    )


def test_the_target_alone_loses_what_the_fixed_length_gains():
    rows = [replace(winner(FIXED, 1.6), speedup=Interval(1.6, 1.25, 2.0))]
    alone = verdict_of(
        Report({}, None, data_sets=sets_of("test", winners=rows)), {}
    ).answer.choices[Kind.ALONE]
    assert alone == ComparedSetting("target alone", Interval(1, 1, 1), Interval(0.625, 0.5, 0.8))
