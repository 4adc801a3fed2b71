"""What is stored in a head's folder of the settings that were tried on dev prompts."""

from types import SimpleNamespace

import pytest

from specheads import AcceptanceHead, HeadConfig
from specheads.decoding.stopping import FixedLength, HeadThreshold
from specheads.evaluation.recommendation import tried_values
from specheads.evaluation.sweep import TARGET_ALONE, Measured, Setting, under_block

HEAD, OTHER = (AcceptanceHead(HeadConfig(8, 0)) for _ in range(2))


def outcome(speeds):
    settings = [
        Setting("head 0.4", "head_threshold", 0.4, HeadThreshold(HEAD, 0.4)),
        Setting("head 0.6", "head_threshold", 0.6, HeadThreshold(OTHER, 0.4)),
        Setting("fixed K=2", "fixed_length", 2, FixedLength(2)),
    ]
    measured = [Measured(setting) for setting in [TARGET_ALONE, *settings, *under_block(settings)]]
    assert len(measured) == 7
    return SimpleNamespace(measured=measured, tried=speeds)


@pytest.mark.parametrize(("block", "expected"), [(150.0, ("block", 1.5)), (110.0, ("token", 1.2))])
def test_the_faster_verification_of_the_same_rule_is_stored(block, expected):
    speeds = {"target alone": 100.0, "head 0.4": 120.0, "head 0.4, block verification": block}
    speeds |= {"head 0.6": 500.0, "head 0.6, block verification": 600.0, "fixed K=2": 700.0}
    again = HeadThreshold(HEAD, 0.4)  # fitted again, to the same value
    values = tried_values(outcome(speeds), again)
    assert (values["verification"], values["measured_speedup"]) == (expected[0], pytest.approx(expected[1]))


def test_nothing_is_stored_of_a_rule_that_was_not_tried():
    assert tried_values(outcome({"target alone": 100.0, "head 0.4": 120.0}), HeadThreshold(HEAD, 0.5)) == {}
    assert tried_values(outcome({}), HeadThreshold(HEAD, 0.4)) == {}
