"""Scores of canned answers."""

from decimal import Decimal

import pytest

from specheads import UserError
from specheads.prompts.data_set_source import DatasetSource
from specheads.prompts.prompt import _last_number, check_references, exact_number, rouge_l


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Natalia sold 48+24 = <<48+24=72>>72 clips.\n#### 72", "72"),
        ("The answer is 1,234.50.", "1234.5"),
        ("12,345,678 and no more", "12345678"),
        ("so x = -7", "-7"),
        ("it fell to \u22127 degrees", "-7"),
        ("a loss of -$5", "-5"),
        ("$1,000 in all", "1000"),
        ("10-5", "5"),  # a minus between two numbers is no sign
        ("take 3, 4", "4"),
        ("costs 1,2345", "2345"),  # no groups of three
        ("half is .5", "0.5"),
        ("...5", "5"),
        ("ends in 42.", "42"),
        ("3.5%", "3.5"),
    ],
)
def test_the_last_number_is_read(text, number):
    assert _last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "no number", "$, and -."])
def test_a_text_may_have_no_number(text):
    assert _last_number(text) is None


REFERENCE = "She had 5 and bought 65 more.\n#### 70,000"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("That makes 70000.", 1),
        ("That makes $70,000.00 in 1 year, so 70,000.0", 1),
        ("#### 70000", 1),
        ("70,000, no: 70", 0),
        ("-70,000", 0),
        ("I do not know.", 0),
    ],
)
def test_a_response_is_right_if_its_last_number_is_the_references(response, score):
    assert exact_number(response, REFERENCE) == score


@pytest.mark.parametrize(
    ("score", "references", "message"),
    [
        ("exact_number", ["#### 4", None, "#### none"], "compares numbers, but a response of the data set has none: '#### none'"),
        ("exact_number", ["4 #### of"], "has none"),
        ("rouge_l", [None, None], "none of 2 prompts has one in the fields of data.response_template"),
    ],
)
def test_references_that_say_nothing_are_refused(score, references, message):
    with pytest.raises(UserError, match=message):
        check_references(score, references)
    check_references(score, ["#### 4", None])


def f_measure(common, ours, theirs):
    precision, recall = common / ours, common / theirs
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("response", "reference", "expected"),
    [
        ("police killed the gunman", "police kill the gunman", f_measure(3, 4, 4)),  # police the gunman; Lin 2004, section 3
        ("the gunman kill police", "police kill the gunman", f_measure(2, 4, 4)),  # the gunman
        ("The cat, the CAT!", "the cat", f_measure(2, 4, 2)),
        ("a b c d e", "b x d", f_measure(2, 5, 3)),
        ("nothing in common", "something else", 0.0),
        ("", "a reference", 0.0),
    ],
)
def test_rouge_l_is_that_of_the_longest_common_subsequence(response, reference, expected):
    assert rouge_l(response, reference) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("score", "response_template", "message"),
    [
        ("bleu", "{a}", r"data.score='bleu' must be exact_number, rouge_l, or null"),
        ("rouge_l", None, r"data.response_template=null; say where they are"),
    ],
)
def test_a_score_that_cannot_be_computed_is_refused(score, response_template, message):
    with pytest.raises(UserError, match=message):
        DatasetSource("rows.jsonl", None, "train", None, "{q}", None, 1, 1, 1, response_template, score=score)
