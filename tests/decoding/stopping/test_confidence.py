from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from specheads import UserError
from specheads.decoding.stopping import Confidence, MaxProbability
from specheads.decoding.stopping.confidence import NUM_REMEMBERED, best_threshold


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


def test_confidence_is_retuned_once_there_are_six_tokens_of_two_kinds():
    rule = Confidence(0.4)
    state = rule.start_prompt(1, torch.device("cpu"))
    count, state = drafted(rule, state, "draft_prob", [0.9, 0.8, 0.7, 0.3])
    state = rule.start_round(
        rule.end_round(state, *outcome(count, 2))
    )  # 0.9 and 0.8 accepted, 0.7 rejected, 0.3 without an outcome
    assert state.threshold.item() == 0.4
    count, state = drafted(rule, state, "draft_prob", [0.95, 0.6, 0.5, 0.35])
    state = rule.start_round(rule.end_round(state, *outcome(count, 3)))
    # false positive rate + 3 x false negative rate: 1.2 from 0.8 on, 0.5 + 3 x 1 / 5 from 0.6 on, 0.5 from 0.5 on, 1 from 0.35 on
    assert state.threshold.item() == 0.5
    assert drafted(rule, state, "draft_prob", [0.5, 0.49])[0] == 2
    assert (state.memory.accepted >= 0).sum() == 7


def test_six_outcomes_are_enough_for_the_row_that_has_them():
    """The others have accepted tokens only, and rejected ones only."""
    rule = Confidence(0.4)
    state = rule.start_prompt(3, torch.device("cpu"))
    for prob in (0.9, 0.8, 0.7, 0.6, 0.5, 0.3):
        assert state.threshold.tolist() == [0.4, 0.4, 0.4]
        state, _ = rule.step(state, {"draft_prob": torch.full((3,), prob, dtype=torch.float64)})
        state = rule.start_round(rule.end_round(state, torch.ones(3, dtype=torch.long), torch.tensor([prob > 0.4, 1, 0])))
    assert state.threshold.tolist() == [0.5, 0.4, 0.4]


@pytest.mark.parametrize("accepted", [6, 0])
def test_confidence_does_not_adapt_to_tokens_of_one_kind(accepted):
    rule = Confidence(0.4)
    state = rule.start_prompt(1, torch.device("cpu"))
    for _ in range(7):
        _, state = drafted(rule, state, "draft_prob", [0.9] * 6)
        state = rule.start_round(rule.end_round(state, *outcome(6, accepted)))
    assert (state.memory.accepted >= 0).sum() == (42 if accepted else 7)
    assert state.threshold.item() == 0.4


def test_confidence_can_be_kept_from_adapting():
    rule = Confidence(0.4, retune=False)
    state = rule.start_prompt(1, torch.device("cpu"))
    for _ in range(9):
        _, state = drafted(rule, state, "draft_prob", [0.9, 0.8])
        state = rule.start_round(rule.end_round(state, *outcome(2, 1)))
    assert state.threshold.item() == 0.4


def roc_threshold(labels, scores, drop_intermediate):
    """What scikit-learn's roc_curve and argmin give, in fractions: rounding decides nothing."""
    ranked = sorted(zip(scores, labels, strict=True), key=lambda pair: -pair[0])
    last = [i for i, (score, _) in enumerate(ranked) if i + 1 == len(ranked) or ranked[i + 1][0] != score]
    points = [(i + 1 - sum(y for _, y in ranked[: i + 1]), sum(y for _, y in ranked[: i + 1]), ranked[i][0]) for i in last]
    if drop_intermediate and len(points) > 2:
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(points)]
        kept = [True, *(a != b for a, b in pairwise(steps)), True]
        points = [point for point, is_kept in zip(points, kept, strict=True) if is_kept]
    points = [(0, 0, float("inf")), *points]
    zeros, ones = points[-1][:2]
    costs = [Fraction(fps, zeros) + 3 * (1 - Fraction(tps, ones)) for fps, tps, _ in points]
    return points[costs.index(min(costs))][2]


@pytest.mark.parametrize("levels", [4, 12, 10**6])  # few levels: many ties
@pytest.mark.parametrize("drop_intermediate", [False, True])
def test_the_best_threshold_is_that_of_the_roc_curve(levels, drop_intermediate):
    generator = torch.Generator().manual_seed(levels)
    scores = (torch.randint(1, levels + 1, (300, 24), generator=generator) / levels).double()
    labels = torch.randint(-1, 2, (300, 24), generator=generator)
    labels[:, 0], labels[:, 1] = 0, 1
    thresholds = best_threshold(scores, labels).tolist()
    for row, (row_scores, row_labels) in enumerate(zip(scores, labels, strict=True)):
        there = row_labels >= 0
        assert thresholds[row] == roc_threshold(row_labels[there].tolist(), row_scores[there].tolist(), drop_intermediate)


def test_confidence_remembers_the_newest_tokens():
    rule, generator, pairs = Confidence(0.0, max_tokens=9), torch.Generator().manual_seed(0), []
    state = rule.start_prompt(1, torch.device("cpu"))
    for number in range(80):
        probs = torch.rand(9, generator=generator, dtype=torch.float64).tolist()
        count, accepted = number % 10, min(number % 10, torch.randint(0, 10, (), generator=generator).item())
        for prob in probs[:count]:
            state, _ = rule.step(state, {"draft_prob": torch.tensor([prob], dtype=torch.float64)})
        before, state = state.threshold, rule.start_round(rule.end_round(state, *outcome(count, accepted)))
        pairs += list(zip(probs, [1] * accepted + [0] * (accepted < count), strict=False))
        pairs = pairs[-NUM_REMEMBERED:]
        known = state.memory.accepted[0] >= 0
        assert state.memory.probs[0, known].tolist() == [prob for prob, _ in pairs]
        assert state.memory.accepted[0, known].tolist() == [label for _, label in pairs]
        enough = len(pairs) > 5 and {label for _, label in pairs} == {0, 1}
        assert state.threshold == (roc_threshold([y for _, y in pairs], [p for p, _ in pairs], True) if enough else before)
    assert len(pairs) == NUM_REMEMBERED


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaxProbability(1.1), r"threshold=1\.1"),
        (lambda: MaxProbability(max_tokens=0), "max_tokens=0"),
        (lambda: Confidence("high"), "threshold=high .*; it is a probability under the draft, for example 0.4[.]$"),
        (lambda: Confidence(retune=1), "retune=1"),
        (lambda: Confidence(max_tokens=2.0), r"max_tokens=2\.0"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()
