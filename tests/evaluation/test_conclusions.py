"""What a report concludes: the setting to use, what that rests on, and what to know besides."""

from dataclasses import replace

import pytest

from specheads.decoding.step_costs import StepCosts
from specheads.evaluation.candidates import FIXED, TARGET
from specheads.evaluation.conclusions import (
    change,
    changes_text,
    counted_text,
    fastest_by_kind,
    first_ratio,
    information_text,
    is_trusted,
    main_data_set,
    percent,
    preferred,
    ratio_text,
    ratios_of,
    times,
    use_text,
    used_at,
    verdict_of,
    warnings_of,
    winners_at,
)
from specheads.evaluation.report import (
    COUNTED,
    MEASURED,
    ROUNDS,
    STEPS,
    Answer,
    Basis,
    BatchRow,
    BatchTable,
    Choice,
    DataSet,
    Information,
    Kind,
    LiveRow,
    Report,
    RuleRow,
    Winner,
)
from specheads.evaluation.tables import batch_table
from specheads.replay.cost import CostFit
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


def verdict(uses, live=LIVE, **values):
    """The verdict on decoded settings, of which dev prompts chose one."""
    tried = {"dev_speedup": 1.0} if uses else {}
    return verdict_of(
        Report({}, None, live=[replace(row, **tried) for row in live], **values), uses
    )


def test_the_setting_to_use_is_the_one_that_dev_prompts_chose():
    """On the decoded prompts another one may be faster."""
    answer = verdict({MEASURED: "head 0.4"}).answer
    assert answer.choices[answer.use].name == "head 0.4" and use_text(answer).startswith(
        "1.40× [1.30,\u00a01.50] the target alone"
    )
    assert answer.skip_head is None


def test_where_nothing_is_clearly_faster_it_is_the_target_alone():
    answer = verdict({MEASURED: "target alone"}).answer
    said = "No setting was clearly faster on dev prompts; here fixed_length(num_tokens=3) is 1.50×"
    assert answer.use == Kind.ALONE and use_text(answer).startswith(said)


def test_where_nothing_was_tried_it_is_the_fastest_and_that_is_said():
    found = verdict({})
    assert found.answer.use == Kind.FIXED and "the fastest of these same prompts" in found.rests_on


def test_a_head_is_skipped_where_dev_prompts_chose_what_needs_none():
    head = replace(LIVE[2], over_headless=Interval(0.93, 0.9, 0.97))
    answer = verdict({MEASURED: "fixed_length(num_tokens=3)"}, [*LIVE[:2], head]).answer
    assert answer.skip_head.endswith(
        "here it is −6.7\u00a0% [−10.0,\u00a0−3.0] against that".replace("6.7", "7.0")
    )
    assert "no rule is clearly faster than this fixed length" in use_text(answer)


def test_doubts_are_one_line_next_to_an_answer():
    found = verdict({}, doubts=["It was busy.", "Too few."])
    assert found.doubt == "it was busy" and found.answer.use == Kind.FIXED


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


def test_estimates_are_written_with_their_limits():
    assert str(times(Interval(1.704, 1.6, 1.816))) == "1.70× [1.60,\u00a01.82]"
    assert str(change(Interval(1.044, 0.956, 1.1))) == "+4.4\u00a0% [−4.4,\u00a0+10.0]"
    assert str(percent(Interval(-0.314, -0.5, 0.25))) == "−31\u00a0% [−50,\u00a025]"


def sets_of(*roles, winners=(), rules=()):
    return [
        DataSet(f"set {number}", role, 7, 1, 1, list(rules), list(winners))
        for number, role in enumerate(roles)
    ]


BUSY = ["Busy."]
MACHINE = CostFit(StepCosts(0.002, 0.011))
BASES = {
    costs: Basis(costs, Interval(5.5, 5.0, 6.04), ["a", "b", "c"])
    for costs in (ROUNDS, STEPS, COUNTED)
}


@pytest.mark.parametrize(
    ("doubts", "costs", "trusted"),
    [
        ([], None, True),
        ([], ROUNDS, True),
        (BUSY, None, False),
        (BUSY, ROUNDS, False),
        (BUSY, STEPS, True),
        (BUSY, COUNTED, True),
    ],
)
def test_doubtful_rounds_are_not_trusted_and_come_last(doubts, costs, trusted):
    rule = RuleRow(
        "a", "a", {}, Interval(0, 0, 0), Interval(1, 1, 1), 1.0, None, {"5": Interval(1, 1, 1)}
    )
    winners = [winner(FIXED, 1.5, ratio=ratio) for ratio in ("20", MEASURED, "10")]
    report = Report(
        {},
        MACHINE,
        doubts,
        [],
        sets_of("dev", "test", winners=winners, rules=[rule]),
        basis=BASES.get(costs),
    )
    assert is_trusted(report, MEASURED) == trusted and is_trusted(report, "10")
    assert ratios_of(report) == (
        [MEASURED, "5", "10", "20"] if trusted else ["5", "10", "20", MEASURED]
    )
    assert first_ratio(report) == (MEASURED if trusted else "10")
    how = ("counted" if costs == COUNTED else "measured") + ("" if trusted else ", doubtful")
    assert (ratio_text(report, MEASURED), ratio_text(report, "10")) == (f"5.5 ({how})", "10")
    assert ratio_text(replace(report, fit=None), MEASURED) == how
    verdict = verdict_of(report, {})
    assert (
        verdict.answer.ratio == first_ratio(report) == first_ratio(replace(report, verdict=verdict))
    )
    assert (
        first_ratio(replace(report, verdict=replace(verdict, answer=verdict.others[-1])))
        == verdict.others[-1].ratio
    )


def test_the_ratio_to_begin_with_is_the_measured_one_or_ten():
    found = [
        preferred(ratios) for ratios in ([MEASURED, "10"], ["5", "10", MEASURED], ["5", "20"], [])
    ]
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
        (TARGET, 1.0, 1.0),
        (FIXED, 1.9, 1.2),
        (FIXED, 1.3, 1.3),
        ("logistic", 1.2, 1.5),
        ("head_threshold", 1.1, 1.4),
    ]
    decoded = [
        replace(live(f"{name} {dev}", name, here), dev_speedup=dev) for name, here, dev in rows
    ]
    lossy = replace(live("lossy", "logistic", 3.0), dev_speedup=3.0, lossless=False)
    expected = [(Kind.HEADLESS, 1.5), (Kind.HEAD, 1.4), (Kind.FIXED, 1.3), (Kind.ALONE, 1.0)]
    assert [
        (kind, row.dev_speedup) for kind, row in fastest_by_kind([lossy, *decoded]).items()
    ] == expected
    bound = replace(winner("ceiling", 3.0), bound=True)
    replays = [
        replace(winner(name, here, "mine" if "head" in name else None), dev_speedup=dev)
        for name, here, dev in rows[1:]
    ]
    assert [
        (kind, row.dev_speedup) for kind, row in fastest_by_kind([bound, *replays]).items()
    ] == expected[:3]
    untried = [replace(row, dev_speedup=None) for row in decoded]
    assert fastest_by_kind(untried)[Kind.FIXED].speedup.value == 1.9


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
    assert alone == Choice("target alone", Interval(1, 1, 1), Interval(0.625, 0.5, 0.8))


REPLAYED_ROWS = [
    winner(name, speed, ratio=ratio)
    for ratio in (MEASURED, "5", "10")
    for name, speed in ((FIXED, 1.2), ("fast", 1.4))
]


@pytest.mark.parametrize(
    ("tried", "doubts", "replays", "ratio", "rests_on"),
    [
        (
            True,
            [],
            True,
            MEASURED,
            "Measured here on 4 prompts of set 0, chosen on dev prompts; costs as measured here.",
        ),
        (
            True,
            [],
            False,
            MEASURED,
            "Measured here on 4 prompts, chosen on dev prompts; costs as measured here.",
        ),
        (
            False,
            [],
            True,
            MEASURED,
            (
                "Replayed at ratio 5.5 (measured) on 7 prompts of set 0, chosen on dev prompts;"
                " costs as measured here."
            ),
        ),
        (
            True,
            BUSY,
            True,
            "10",
            (
                "Replayed at ratio 10 on 7 prompts of set 0, chosen on dev prompts; verifying more"
                " tokens costs nothing."
            ),
        ),
        (
            True,
            BUSY,
            False,
            MEASURED,
            (
                "Measured here on 4 prompts, the fastest of these same prompts; costs as measured"
                " here."
            ),
        ),
    ],
)
def test_what_was_decoded_answers_where_dev_prompts_tried_it_and_nothing_is_doubtful(
    tried, doubts, replays, ratio, rests_on
):
    rows = [replace(row, dev_speedup=row.speedup.value if tried else None) for row in LIVE]
    sets = sets_of("test", winners=REPLAYED_ROWS if replays else ()) if replays else []
    report = Report({"num_live_prompts": 4}, MACHINE, doubts, rows, sets)
    found = verdict_of(report, {})
    assert found.answer.ratio == ratio and found.rests_on == rests_on
    assert (found.answer.use == Kind.FIXED) == found.rests_on.startswith(
        "Measured"
    )  # replayed, a rule is faster
    assert verdict_of(replace(report, context={}), {}).rests_on == rests_on.replace(
        "on 4", "on some"
    )


def test_what_was_decoded_comes_before_the_ratios_that_were_only_replayed():
    rows = [replace(row, dev_speedup=row.speedup.value) for row in LIVE]
    report = Report(
        {},
        MACHINE,
        [],
        rows,
        sets_of("test", winners=[row for row in REPLAYED_ROWS if row.ratio != MEASURED]),
    )
    verdict = verdict_of(report, {})
    assert verdict.answer.ratio == MEASURED and [each.ratio for each in verdict.others] == [
        "5",
        "10",
    ]


def test_what_the_measured_ratio_rests_on_is_said_with_its_range():
    report = Report(
        {}, MACHINE, [], [], sets_of("test", winners=REPLAYED_ROWS), basis=BASES[ROUNDS]
    )
    assert (
        verdict_of(report, {}).rests_on
        == "Replayed at ratio 5.5 (measured) on 7 prompts of set 0, chosen on dev prompts; "
        "by measured rounds a step of the target costs 5.5 draft steps [5.0, 6.0]."
    )
    assert verdict_of(replace(report, doubts=BUSY), {}).rests_on.endswith(
        "verifying more tokens costs nothing."
    )


def test_ratios_that_are_not_to_be_trusted_change_nothing():
    """At doubtful costs the fixed length is best, at the others a rule."""
    rows = [
        winner(name, speed, ratio=ratio)
        for ratio in ("5", "10")
        for name, speed in ((FIXED, 1.2), ("fast", 1.4))
    ]
    rows += [winner(FIXED, 1.5, ratio=MEASURED)]
    report = Report({}, MACHINE, BUSY, [], sets_of("test", winners=rows))
    report = replace(report, verdict=verdict_of(report, {}))
    assert report.verdict.changes == [] and [each.ratio for each in report.verdict.others] == [
        "5",
        MEASURED,
    ]
    assert changes_text(report, report.verdict) == "no: at 5 it is the best without training, too"
    assert (
        used_at(report, MEASURED) is None
        and used_at(report, "5") == "fast"
        and used_at(report, "20") is None
    )
    trusted = replace(report, doubts=[])
    trusted = replace(trusted, verdict=verdict_of(trusted, {}))
    assert (
        changes_text(trusted, trusted.verdict)
        == "yes: at 5 the best without training, at 10 the best without training"
    )
    assert (
        used_at(trusted, MEASURED) == FIXED
        and used_at(replace(trusted, verdict=None), MEASURED) is None
    )
    counted = replace(
        trusted,
        verdict=replace(trusted.verdict, changes=[MEASURED], others=[trusted.verdict.answer]),
    )
    assert changes_text(counted, counted.verdict) == "yes: at 5.5 (measured) the best fixed length"


def test_several_ratios_that_agree_are_named_and_none_is_said():
    rows = [winner(FIXED, 1.5, ratio=ratio) for ratio in ("5", "10", MEASURED)]
    report = Report({}, MACHINE, [], [], sets_of("test", winners=rows))
    assert (
        changes_text(report, verdict_of(report, {}))
        == "no: at 5, 10 it is the best fixed length, too"
    )
    alone = replace(report, data_sets=sets_of("test", winners=rows[:1]))
    assert changes_text(alone, verdict_of(alone, {})) == "not known, no other was replayed"


def test_the_rule_of_a_setting_under_another_verification_is_the_one_to_use():
    row = replace(
        live("fixed_length(num_tokens=3) verification=block", FIXED, 1.6), dev_speedup=1.6
    )
    report = Report({}, None, live=[replace(LIVE[0], dev_speedup=1.0), row])
    assert (
        used_at(replace(report, verdict=verdict_of(report, {})), MEASURED)
        == "fixed_length(num_tokens=3)"
    )


def test_a_doubt_names_what_the_range_of_costs_leaves_open():
    report = Report(
        {},
        MACHINE,
        ["The machine was busy."],
        [],
        sets_of("test", winners=REPLAYED_ROWS),
        basis=BASES[STEPS],
    )
    assert (
        verdict_of(report, {}).doubt
        == "the machine was busy; at ratio 5.0 a is best; at ratio 6.0 c is best"
    )
    sure = replace(report, basis=replace(BASES[STEPS], choices=["a"] * 3))
    assert (
        verdict_of(sure, {}).doubt
        == verdict_of(replace(report, basis=None), {}).doubt
        == "the machine was busy"
    )
    assert verdict_of(replace(report, doubts=[]), {}).doubt is None


def choice(name, speed, gain=None):
    return Choice(name, Interval(speed, speed, speed), gain)


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (
            Interval(1.044, 0.9, 1.01),
            ", +4.4\u00a0% [−10.0,\u00a0+1.0] over the best fixed length.",
        ),
        (
            Interval(0.95, 0.9, 1.0),
            ", no gain: −5.0\u00a0% [−10.0,\u00a0+0.0] over the best fixed length.",
        ),
        (None, "."),
    ],
)
def test_a_rule_is_said_with_its_gain_over_the_fixed_length(gain, said):
    answer = Answer("10", Kind.HEADLESS, {Kind.HEADLESS: choice("a", 1.5, gain)}, None)
    assert use_text(answer) == f"1.50× [1.50,\u00a01.50] the target alone{said}"


def test_a_fixed_length_and_the_target_alone_are_said_without_a_gain():
    choices = {
        Kind.ALONE: choice("target alone", 1),
        Kind.FIXED: choice("K", 1.1),
        Kind.HEAD: choice("mine", 1.2),
    }
    fixed, alone = (Answer("10", use, choices, None) for use in (Kind.FIXED, Kind.ALONE))
    only = replace(fixed, choices={kind: choices[kind] for kind in (Kind.ALONE, Kind.FIXED)})
    speed = "1.10× [1.10,\u00a01.10] the target alone"
    assert (
        use_text(fixed) == f"{speed}; no rule is clearly faster than this fixed length."
        and use_text(only) == f"{speed}."
    )
    here = (
        "No setting was clearly faster on dev prompts; here mine is 1.20× [1.20,\u00a01.20] the"
        " target alone."
    )
    assert use_text(alone) == here
    nothing = replace(alone, choices={Kind.ALONE: choices[Kind.ALONE]})
    assert use_text(nothing) == "Nothing else that was decoded keeps the target's distribution."


def test_a_warning_names_the_share_and_the_remedy_after_the_remarks():
    def warned(share, family="logistic"):
        row = replace(live("a", family, 1.0), accepted_over_expected=share)
        return warnings_of(Report({}, None, live=[row], notes=["A remark."]))

    said = (
        "Of the tokens that a expected to be accepted, 80\u00a0% [70,\u00a089] were, so its"
        " predictions do not hold "
    )
    said += "on these prompts; "
    assert warned(Interval(0.8, 0.7, 0.89)) == ["A remark.", said + "fit it again."]
    remedy = (
        "specheads evaluate head=<folder> calibrate=true, with the same model, data and warp, fits"
        " it to such prompts."
    )
    assert warned(Interval(0.8, 0.7, 0.89), "head_threshold") == ["A remark.", said + remedy]
    assert (
        warned(None)
        == warned(Interval(1.3, 1.1, 1.5))
        == warned(Interval(0.8, 0.7, 0.9))
        == ["A remark."]
    )


def test_what_can_be_known_is_said_in_nats_and_shares():
    def of(value):
        return Interval(value, value - 0.1, value + 0.1)

    known = Information(
        9, of(0.6543), of(0.4), of(0.2543), {"mine": of(0.5), "free logistic": of(0.0)}, {}
    )
    assert (
        information_text(known)
        == "0.654 nats per drafted token, of which 0.400 are irreducible and 0.254 reducible; "
        "of these explain: mine 50\u00a0% [40,\u00a060], free logistic nothing"
    )


@pytest.mark.parametrize(
    ("ratio", "costs", "heads", "said"),
    [
        (MEASURED, ROUNDS, ["mine"], "costs as measured here"),
        (MEASURED, None, [], "costs as measured here"),
        (MEASURED, COUNTED, [], "verifying more tokens costs nothing"),
        ("10", ROUNDS, [], "verifying more tokens costs nothing"),
        (
            "10",
            None,
            ["mine"],
            "verifying more tokens costs nothing, heads’ costs are counted from their weights",
        ),
    ],
)
def test_which_costs_count_is_said(ratio, costs, heads, said):
    assert counted_text(Report({"heads": heads}, None, basis=BASES.get(costs)), ratio) == said
