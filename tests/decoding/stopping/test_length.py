import pytest
import torch

from specheads import UserError
from specheads.decoding.stopping import FixedLength, Heuristic


def planned(rule, outcomes):
    """The lengths that a rule plans for rounds of these outcomes (drafted, accepted), and for one round more."""
    state, lengths = rule.start_prompt(1, torch.device("cpu")), []
    for outcome in [*outcomes, None]:
        lengths.append(state.num_tokens.item())
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


def test_the_heuristic_grows_by_two_and_shrinks_by_one():
    assert planned(Heuristic(), [(5, 5), (7, 3), (0, 0), (2, 2)]) == [5, 7, 6, 6, 8]
    assert planned(Heuristic(3, 1, 2), [(3, 0), (1, 0), (1, 1)]) == [3, 1, 1, 2]
    assert planned(Heuristic(5, max_tokens=6), [(5, 5), (6, 6)]) == [5, 6, 6]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLength(0), "num_tokens=0 must be a positive integer"),
        (lambda: FixedLength(2.5), "num_tokens=2.5"),
        (lambda: Heuristic(0), "start=0 and max_tokens=20"),
        (lambda: Heuristic(21), "start=21 and max_tokens=20"),
        (lambda: Heuristic(max_tokens=0), "max_tokens=0"),
        (lambda: Heuristic(increase=-1), "increase=-1"),
        (lambda: Heuristic(decrease=0.5), r"decrease=0\.5"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()
