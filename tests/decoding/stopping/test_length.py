import pytest
import torch

from specheads import UserError
from specheads.decoding.stopping import FixedLength


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLength(0), "num_tokens=0 must be a positive integer"),
        (lambda: FixedLength(2.5), "num_tokens=2.5"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()
