import logging

import pytest
from omegaconf import OmegaConf

from specheads.errors import UserError
from specheads.prompts.templates import Template

ALPACA = ("{instruction}\nInput: {input}", "{instruction}")


def filled(template, row):
    return Template.parse("data.template", template).fill(row)


def test_fields_are_filled_in_and_doubled_braces_are_braces():
    assert filled("{{x}} {a}: {b}{a}", {"a": "one", "b": "{a}", "c": "unused"}) == "{x} one: {a}one"


@pytest.mark.parametrize(
    ("template", "row", "text"),
    [
        ("{t[de]}", {"t": {"de": "Hallo", "en": "Hello"}}, "Hallo"),
        ("{t[0]}", {"t": ["a", "b"]}, "a"),
        ("{t[x][1]}{n}", {"t": {"x": ["a", 7]}, "n": 1}, "71"),
        ("{t[1]}", {"t": ["a"]}, None),
        ("{t[x]}", {"t": ["a"]}, None),
        ("{t[0]}", {"t": "text"}, None),
        ("{t[0]}", {"t": None}, None),
        ("{t[0]}", {}, None),
        ("{t[x]}", {"t": {"x": " "}}, None),
    ],
)
def test_a_field_may_be_a_part_of_a_column(template, row, text):
    assert filled(template, row) == text
    assert (
        Template.parse("k", template).restricted(["t", "n"], "my.jsonl").fields
        == Template.parse("k", template).fields
    )


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"instruction": "a", "input": "b"}, "a\nInput: b"),
        ({"instruction": "a", "input": ""}, "a"),
        ({"instruction": "a", "input": " \n"}, "a"),
        ({"instruction": "a", "input": None}, "a"),
        ({"instruction": "a"}, "a"),
        ({"instruction": "a", "input": 0}, "a\nInput: 0"),
        ({"instruction": " ", "input": "b"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("kind", [list, tuple, OmegaConf.create])
def test_the_first_text_without_blank_fields_is_used(row, text, kind):
    assert filled(kind(list(ALPACA)) if kind is OmegaConf.create else kind(ALPACA), row) == text


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{}", "a field has no name"),
        ("{a", "expected '}' before end of string"),
        ("a}", "Single '}' encountered"),
        ("{a.b}", "the field 'a' has an attribute"),
        ("{a[]}", "the field 'a' has an attribute, a wrong index"),
        ("{a!z}", "the field 'a' has .* a format"),
        ("{a:>9}", "the field 'a' has .* a format"),
        ("{{a}}", "it names no field"),
        ("", "it names no field"),
        (["{a}", "{b"], r"data\.template='\{b': expected"),
    ],
)
def test_malformed_templates_are_user_errors_that_say_how_to_write_one(template, problem):
    with pytest.raises(
        UserError,
        match=f"{problem}.*write plain names of fields in braces, such as {{instruction}}",
    ):
        Template.parse("data.template", template)


def test_a_field_that_the_data_set_lacks_is_named_with_those_it_has():
    template = Template.parse("data.template", ["{instruction} {question}", "{answer}"])
    with pytest.raises(
        UserError,
        match=(
            r"data\.template='\{instruction\} \{question\}' names the field 'question', but my.csv"
            r" has instruction, input"
        ),
    ):
        template.restricted(["instruction", "input"], "my.csv")


def test_a_text_with_an_unknown_field_is_left_out_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        template = Template.parse("data.template", ALPACA).restricted(["instruction"], "my.csv")
    assert template.fields == ["instruction"] and "my.csv has no field 'input'" in caplog.text
