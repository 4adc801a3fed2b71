import pytest
import torch

from specheads.decoding.stopping import Confidence, FixedLength, MaxProbability


def drafted(rule, state, feature, values):
    """How many of a round's tokens with these values of a feature a rule lets be drafted, and its
    state.
    """
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


def planned(rule, outcomes):
    """The lengths that a rule plans for rounds of these outcomes (drafted, accepted), and for one
    round more.
    """
    state = rule.start_prompt(1, torch.device("cpu"))
    lengths = []
    for outcome in [*outcomes, None]:
        lengths.append(state.max_tokens.item())
        if outcome:
            for _ in range(outcome[0]):
                state, stop = rule.step(state, {})
                assert stop.item() == (state.num_drafted >= lengths[-1]).item()
            state = rule.start_round(rule.end_round(state, *(torch.tensor([n]) for n in outcome)))
    return lengths


@pytest.mark.parametrize("k", [1, 2, 7])
def test_fixed_length_drafts_k_tokens_in_every_round(k):
    assert planned(FixedLength(k), [(k, k), (k, 0), (1, 1), (0, 0)]) == [k] * 5
    assert FixedLength(k).max_tokens == k
