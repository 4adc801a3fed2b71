"""Policies of conf/stopping: what a config says of them, and what is refused before anything is measured."""

import pytest

from specheads import UserError, stopping
from specheads.decoding.load_aware import LengthPolicy, LoadAware
from specheads.evaluation.candidates import DEFAULT, FIXED, RuleChoice, check_rules
from specheads.evaluation.settings import Evaluation

AWARE = {"load_aware": RuleChoice(LoadAware, {"max_tokens": 4})}
RULES = {FIXED: RuleChoice(stopping.FixedLength, {"num_tokens": [2, 5]})}


def test_policies_and_rules_are_told_apart():
    settings = Evaluation(stopping=RULES | AWARE, concurrency=(4,))
    assert settings.rules == RULES and settings.policies == AWARE
    assert Evaluation().policies == {} and list(Evaluation().rules) == [FIXED, "head_threshold"]


def test_policies_alone_are_compared_with_the_fixed_lengths():
    settings = Evaluation(stopping=AWARE, concurrency=(4,), fixed_lengths=(3, 6))
    assert settings.rules == {FIXED: RuleChoice(stopping.FixedLength, {"num_tokens": [3, 6]})}


def test_good_choices_pass():
    check_rules(DEFAULT | AWARE)
    check_rules({})


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (
            {"load_aware": RuleChoice(LoadAware, {"max_tokens": 0})},
            r"stopping\.load_aware\.max_tokens=0 must be a positive int",
        ),
        ({"load_aware": RuleChoice(LoadAware, {"max_tokens": [4, 8]})}, r"stopping\.load_aware\.max_tokens=\[4, 8\] must be"),
        ({"load_aware": RuleChoice(LoadAware, {"depth": 3})}, r"stopping\.load_aware has arguments .*depth"),
        ({"other": RuleChoice(LengthPolicy)}, r"stopping\.other has arguments"),
    ],
)
def test_mistakes_get_one_message(policies, message):
    with pytest.raises(UserError, match=message):
        Evaluation(stopping=RULES | policies, concurrency=(4,))


def test_policies_without_batches_are_refused():
    message = r"stopping names load_aware, which decides for requests that are decoded together; .* 'concurrency=\[1,4,16,64\]'"
    for settings in (AWARE, RULES | AWARE):
        with pytest.raises(UserError, match=message):
            Evaluation(stopping=settings)
    with pytest.raises(UserError, match="live_rules names load_aware, which decodes batches only"):
        Evaluation(stopping=RULES | AWARE, concurrency=(4,), live_rules=("load_aware",))
