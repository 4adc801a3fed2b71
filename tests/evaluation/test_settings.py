"""Settings of evaluations: the classes agree with conf/, mistakes get one message, and the library
needs neither.
"""

import pytest

from specheads import UserError, papers, stopping, verification
from specheads.commands.compose import command_config
from specheads.commands.evaluate import evaluation_settings
from specheads.evaluation.candidates import FIXED, RuleChoice
from specheads.evaluation.settings import Evaluation
from specheads.pair.generation_config import TargetWarp

COMMANDS = {
    "evaluate": (Evaluation, evaluation_settings),
}
OBJECTS = ("stopping", "drafting", "verification")  # made from config groups


def composed(command, *overrides):
    return command_config(command, ["model=nano", "paths.run=run", *overrides])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_defaults_of_a_class_are_those_of_its_config(command):
    cls, composed_settings = COMMANDS[command]
    ours = cls()
    theirs = composed_settings(composed(command, "data=alpaca"))
    for name in cls.model_fields.keys() - OBJECTS:
        assert getattr(ours, name) == getattr(theirs, name), name
        assert cls.model_fields[name].description


def test_rules_of_the_library_are_the_first_ones_of_the_config():
    ours = Evaluation().rules
    theirs = evaluation_settings(composed("evaluate")).rules
    assert list(ours) == [FIXED, "head_threshold"]
    for name, choice in ours.items():
        assert choice == theirs[name]


def test_a_config_becomes_classes_and_objects():
    words = [
        "drafting=graph",
        "verification=tree_match",
        "stopping=[fixed_length,logistic]",
        "head=null",
        "warp.temperature=0",
    ]
    settings = evaluation_settings(composed("evaluate", *words, "fixed_lengths=[2,5]"))
    assert isinstance(settings.drafting, papers.Graph) and isinstance(
        settings.verification, papers.TreeMatch
    )
    assert settings.rules[FIXED] == RuleChoice(stopping.FixedLength, {"num_tokens": [2, 5]})
    assert settings.rules["logistic"].cls is stopping.Logistic and settings.warp == TargetWarp(
        0, given=("temperature",)
    )
    assert not settings.can_replay


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"thresholds": [1.2]},
            r"thresholds=1\.2 must be a number from 0 to 1, or auto; it is thresholds to try",
        ),
        ({"fixed_lengths": [2.5]}, r"fixed_lengths=2\.5 must be a positive integer"),
        (
            {"record": {"foo": 1}},
            r"record\.foo=1 is not known; expected one of num_samples, ground_truth",
        ),
        ({"record": {"ground_truth": "yes"}}, r"record\.ground_truth=yes must be true or false"),
        ({"ratios": [1]}, r"ratios=1 must be a finite number above 1"),
        ({"ratios": [float("inf")]}, r"ratios=inf must be a finite number"),
        ({"live": "none", "ratios": []}, r"live=none with ratios=\[\] leaves no costs"),
        ({"engine": "warp"}, "engine=warp must be one of auto, eager"),
        ({"seed": -1}, "seed=-1 must be a non-negative integer"),
        ({"stopping": {}}, "stopping leaves out fixed_length"),
        (
            {"stopping": {FIXED: RuleChoice(stopping.FixedLength, {"num_tokens": []})}},
            "must name at least one value",
        ),
        ({"drafting": papers.Tree()}, "does not take what Tree drafts"),
        (
            {"verification": verification.BlockVerification(), "live": "none"},
            "live=none, but autoregressive drafts under .* can only be decoded",
        ),
        (
            {"verification": verification.BlockVerification(), "live_rules": ["other"]},
            "leaves nothing to decode",
        ),
    ],
)
def test_a_mistake_is_one_message_with_its_key(values, message):
    with pytest.raises(UserError, match=message):
        Evaluation(**values)


def test_settings_are_changed_by_copies_that_are_checked_too():
    settings = Evaluation(num_prompts=7)
    assert settings.but(repeats=2).num_prompts == 7
    with pytest.raises(UserError, match="repeats=0 must be a positive integer"):
        settings.but(repeats=0)
