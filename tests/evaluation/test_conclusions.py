"""What a report concludes from decoded batches, and what it recommends."""

from dataclasses import replace

import pytest
from rich.console import Console

from specheads.evaluation.candidates import FIXED
from specheads.evaluation.conclusions import key_findings
from specheads.evaluation.intervals import Interval
from specheads.evaluation.report import BatchRow, BatchTable, DataSet, LiveRow, Report, Winner
from specheads.evaluation.reporting import print_report

LEVELS = {"p50": 1.0, "p90": 1.0, "p99": 1.0}


def batch(size, *settings):
    """A table of settings, each a name, a family, tokens per second and whether it is lossless."""
    rows = [
        BatchRow(name, family, lossless, speed, speed / 100, 1.0, Interval(1, 1, 1), LEVELS, LEVELS, 1.0)
        for name, family, speed, lossless in settings
    ]
    return BatchTable(size, 8, rows)


ALONE = ("target alone", "target", 100.0, True)


EXPECTED = {
    "up to a size": (
        (150, 90),
        (
            "the best setting is faster than the target alone with 1 (1.50×, fixed K=3) requests at once, "
            "but not with 64 (0.98×, head 0.4)."
        ),
    ),
    "always": (
        (150, 140),
        ("the best setting is faster than the target alone with 1 (1.50×, fixed K=3), 64 (1.40×, fixed K=3) requests at once."),
    ),
    "never": (
        (80, 90),
        ("no setting is faster than the target alone: 1 (0.98×, head 0.4), 64 (0.98×, head 0.4) requests at once."),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_finding_says_up_to_which_batch_speculation_pays(name):
    fast, text = EXPECTED[name][0], f"In batches, {EXPECTED[name][1]}"
    aware = 147.0 if fast[0] > 100 else 98.0
    lossy = ("TETRIS", "tetris", 500.0, False)
    tables = [
        batch(1, ALONE, ("fixed K=3", "fixed_length", fast[0], True), ("head 0.4", "head_threshold", aware, True), lossy),
        batch(64, ALONE, ("fixed K=3", "fixed_length", fast[1], True), ("head 0.4", "head_threshold", 98.0, True), lossy),
    ]
    report = Report({"model": "tiny"}, None, batches=tables)
    assert key_findings(report) == [text] and key_findings(replace(report, batches=[])) == []
    for doubts, said in (([], True), (["busy"], False)):
        console = Console(record=True, width=400)
        print_report(replace(report, doubts=doubts), console)
        assert (text in console.export_text()) == said


def live(name, family, speed):
    """A setting that was decoded, `speed` times as fast as the target alone."""
    values = Interval(100 * speed, 90 * speed, 110 * speed), Interval(speed, speed - 0.1, speed + 0.1)
    rates = Interval(0, 0, 0), Interval(1, 1, 1)
    head = "mine" if family == "head_threshold" else None
    return LiveRow(
        name, family, None, *values, *rates, 1.0, None, LEVELS, None, None, lossless=True, efficiency_gain=None, head=head
    )


LIVE = [live("target alone", "target", 1.0), live("fixed K=3", "fixed_length", 1.5), live("head 0.4", "head_threshold", 1.4)]


def test_the_first_finding_says_what_to_use():
    """Dev prompts chose it, so the fastest on the decoded prompts need not be it."""
    report = Report({}, None, live=LIVE, recommended="head 0.4")
    (text,) = key_findings(report)
    assert text.startswith("For this pair on this machine, use head 0.4: it decodes 140.0 tokens per second, 1.4")
    assert "as fast as the target alone" in text and "K=3" not in text
    assert key_findings(replace(report, doubts=["busy"])) == []


def test_where_nothing_is_faster_it_says_so():
    (text,) = key_findings(Report({}, None, live=LIVE, recommended="target alone"))
    assert text.startswith("For this pair on this machine, use the target alone, 100.0 tokens per second")


def test_where_nothing_was_tried_the_fastest_is_named():
    (text,) = key_findings(Report({}, None, live=LIVE))
    assert text.startswith("Measured: the fastest setting, fixed K=3,")


@pytest.mark.parametrize(("low", "high", "said"), [(0.70, 0.80, True), (0.85, 0.95, False), (1.05, 1.3, False), (1.2, 1.4, True)])
@pytest.mark.parametrize("family", ["head_threshold", "logistic"])
def test_predictions_that_do_not_hold_are_named_with_the_remedy(low, high, said, family):
    row = replace(live("mine", family, 1.4), accepted_over_expected=Interval((low + high) / 2, low, high))
    for doubts in ([], ["busy"]):  # no times decide it
        report = Report({}, None, live=[LIVE[0], row], recommended="mine", doubts=doubts)
        texts = [text for text in key_findings(report) if "mine expected to be accepted" in text]
        assert len(texts) == said
        assert not said or ("calibrate=true" in texts[0]) == (family == "head_threshold")


def winner(family, speed, head=None, share=None, even=None, gap=None):
    """The best rule of a family at ratio 10, which gains 2 % over a fixed length."""
    cost = (None, None) if head is None else (share, Interval(even, even, even))
    speedup = Interval(speed, speed - 0.1, speed + 0.1)
    return Winner(family, family, "10", speedup, Interval(1.02, 1.01, 1.03), gap, gap, speed, *cost, head=head)


def findings(*winners):
    rates = 1, 1, 1
    return key_findings(Report({}, None, data_sets=[DataSet("prompts", "test", *rates, [], list(winners))]))


def test_where_no_rule_beats_the_target_alone_a_sentence_says_so():
    bound = replace(winner("ceiling", 1.2), bound=True)
    (text,) = findings(winner("head", 0.8, "mine", 0.2, 0.1), winner(FIXED, 0.9), winner("logistic", 0.7), bound)
    assert text == (
        "At ratio 10, nothing is predicted to be faster than the target alone: the best setting, fixed_length, is 0.90× "
        "[0.80,\u00a01.00] as fast."
    )
    (text,) = findings(winner("head", 1.01, "mine", 0.1, 0.2), winner(FIXED, 0.9), bound)
    assert "the head (head) is 1.01×" in text and "closing" not in text and "does not pay" not in text


@pytest.mark.parametrize(
    ("even", "said"), [(0.1, "would break even at 10 %."), (-0.05, "would not even pay if it added nothing.")]
)
def test_a_head_that_does_not_pay_is_named(even, said):
    (text,) = findings(winner("head", 1.5, "mine", 0.2, even), winner(FIXED, 1.6))
    assert f"it does not pay for its head, which adds 20 % to a draft step and {said}" in text
