"""What a report concludes: the setting to use, what that rests on, and what to know besides."""

from dataclasses import replace

import pytest

from specheads.evaluation.candidates import FIXED
from specheads.evaluation.conclusions import (
    changes_text,
    use_text,
    used_at,
    verdict_of,
    warnings_of,
)
from specheads.evaluation.intervals import Interval
from specheads.evaluation.report import MEASURED, BatchRow, BatchTable, DataSet, Kind, LiveRow, Report, Winner
from specheads.evaluation.tables import batch_table

LEVELS = {"p50": 1.0, "p90": 1.0, "p99": 1.0}


@pytest.mark.parametrize(("fast", "marked"), [(150, "K=3"), (80, "target alone")])
def test_of_a_batch_the_fastest_setting_that_keeps_the_distribution_is_marked(fast, marked):
    settings = [("target alone", 100.0, True), ("K=3", fast, True), ("head", 98.0, True), ("TETRIS", 500.0, False)]
    rows = [
        BatchRow(name, name, lossless, speed, speed / 100, 1.0, Interval(1, 1, 1), LEVELS, LEVELS, 1.0)
        for name, speed, lossless in settings
    ]
    for doubts in ([], ["busy"]):  # of untrusted times none is the best
        table = batch_table(Report({}, None, doubts), BatchTable(1, 8, rows))
        tags = {row[0].text: row[0].tag for row in table.rows}
        assert tags.pop("TETRIS") == "lossy"
        assert [name for name, tag in tags.items() if tag] == ([] if doubts else [marked])


def live(name, family, speed):
    """A setting that was decoded, `speed` times as fast as the target alone."""
    values = Interval(100 * speed, 90 * speed, 110 * speed), Interval(speed, speed - 0.1, speed + 0.1)
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
    return verdict_of(Report({}, None, live=[replace(row, **tried) for row in live], **values), uses)


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
    assert answer.skip_head.endswith("here it is −6.7\u00a0% [−10.0,\u00a0−3.0] against that".replace("6.7", "7.0"))
    assert "no rule is clearly faster than this fixed length" in use_text(answer)


def test_doubts_are_one_line_next_to_an_answer():
    found = verdict({}, doubts=["It was busy.", "Too few."])
    assert found.doubt == "it was busy" and found.answer.use == Kind.FIXED


@pytest.mark.parametrize(("low", "high", "said"), [(0.70, 0.80, True), (0.85, 0.95, False), (1.05, 1.3, False), (1.2, 1.4, True)])
@pytest.mark.parametrize("family", ["head_threshold", "logistic"])
def test_predictions_that_do_not_hold_are_named_with_the_remedy(low, high, said, family):
    row = replace(live("mine", family, 1.4), accepted_over_expected=Interval((low + high) / 2, low, high))
    for doubts in ([], ["busy"]):  # no times decide it
        report = Report({}, None, live=[LIVE[0], row], doubts=doubts)
        texts = [text for text in warnings_of(report) if "mine expected to be accepted" in text]
        assert len(texts) == said
        assert not said or ("calibrate=true" in texts[0]) == (family == "head_threshold")


def winner(family, speed, head=None, ratio="10", **values):
    """The best rule of a family at a ratio, which gains 2 % over a fixed length."""
    speedup, gain = Interval(speed, speed - 0.1, speed + 0.1), Interval(1.02, 1.01, 1.03)
    return Winner(family, family, ratio, speedup, gain, None, speed, head=head, rule_name=family, over_headless=gain, **values)


def replayed(*winners, uses):
    report = Report({}, None, data_sets=[DataSet("prompts", "test", 1, 1, 1, [], list(winners))])
    return replace(report, verdict=verdict_of(report, uses))


@pytest.mark.parametrize(
    ("at_20", "said"), [("head", "no: at 20 it is the head, too"), (FIXED, "yes: at 20 the best fixed length")]
)
def test_another_ratio_changes_the_winner_or_does_not(at_20, said):
    rows = [winner(name, 1.5, head, ratio) for ratio in ("10", "20") for name, head in ((FIXED, None), ("head", "mine"))]
    report = replayed(*rows, uses={"10": "head", "20": at_20})
    assert report.verdict.answer.use == Kind.HEAD and changes_text(report, report.verdict) == said
    assert used_at(report, "10") == "head" and used_at(report, "20") == at_20
    assert use_text(report.verdict.answer).endswith("+2.0\u00a0% [+1.0,\u00a0+3.0] over the best fixed length.")


def test_a_bound_is_no_choice():
    rows = [winner(FIXED, 1.2), replace(winner("ceiling", 1.9), bound=True)]
    answer = replayed(*rows, uses={"10": FIXED}).verdict.answer
    assert set(answer.choices) == {Kind.ALONE, Kind.FIXED} and answer.choices[Kind.ALONE].gain.value == pytest.approx(1 / 1.2)


def test_a_gain_that_is_none_is_said_in_words():
    rows = [replace(winner("head", 1.1, "mine"), gain=Interval(0.9, 0.8, 0.99)), winner(FIXED, 1.2)]
    text = use_text(replayed(*rows, uses={"10": "head"}).verdict.answer)
    assert "no gain: −10.0\u00a0% [−20.0,\u00a0−1.0] over the best fixed length" in text
