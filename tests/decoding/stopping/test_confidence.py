import pytest
import torch

from specheads import UserError
from specheads.decoding.stopping import Confidence, MaxProbability


def drafted(rule, state, feature, values):
    """How many of a round's tokens with these values of a feature a rule lets be drafted, and its state."""
    for count, value in enumerate(values, start=1):
        state, stop = rule.step(state, {feature: torch.tensor([value], dtype=torch.float64)})
        if stop:
            return count, state
    return None, state


def outcome(*counts):
    return [torch.tensor([count]) for count in counts]


@pytest.mark.parametrize(
    ("rule", "feature", "values", "expected"),
    [
        (MaxProbability(0.5), "max_prob", [0.9, 0.5, 0.49], 3),
        (MaxProbability(0.0, max_tokens=4), "max_prob", [0.1] * 9, 4),
        (Confidence(0.4), "draft_prob", [0.9, 0.4, 0.39], 3),
        (Confidence(0.0), "draft_prob", [0.1] * 30, 20),
    ],
)
def test_a_draft_ends_with_the_first_doubtful_token(rule, feature, values, expected):
    state = rule.start_prompt(1, torch.device("cpu"))
    for _ in range(2):
        count, state = drafted(rule, state, feature, values)
        assert count == expected
        state = rule.start_round(rule.end_round(state, *outcome(0, 0)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaxProbability(1.1), r"threshold=1\.1"),
        (lambda: MaxProbability(max_tokens=0), "max_tokens=0"),
        (lambda: Confidence("high"), "threshold=high .*; it is a probability under the draft, for example 0.4[.]$"),
        (lambda: Confidence(max_tokens=2.0), r"max_tokens=2\.0"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()
