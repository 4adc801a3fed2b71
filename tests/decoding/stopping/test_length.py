import math

import pytest
import torch

from specheads import UserError
from specheads.decoding.stopping import AcceptedAverage, BanditLength, FixedLength, Heuristic


def planned(rule, outcomes):
    """The lengths that a rule plans for rounds of these outcomes (drafted, accepted), and for one round more."""
    state, lengths = rule.start_prompt(1, torch.device("cpu")), []
    for outcome in [*outcomes, None]:
        lengths.append(rule.planned_length(state).item())
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


def test_the_average_follows_what_was_accepted():
    # averages 4, 3.2, 2.56, 5.648 (an accepted draft of 18), 5.648
    assert planned(AcceptedAverage(), [(5, 0), (4, 0), (18, 18), (0, 0)]) == [5, 4, 4, 7, 7]
    assert planned(AcceptedAverage(1, 1.0, 0), [(1, 0), (1, 1)]) == [1, 1, 1]
    assert planned(AcceptedAverage(4, 1.0, 2, max_tokens=6), [(4, 4), (6, 6), (6, 0)]) == [4, 6, 6, 2]


def upper_bounds(arms, history, cost_ratio, exploration):
    """The arm that plain arithmetic takes after `history` of (arm, accepted)."""
    indices = []
    for arm in arms:
        emitted = [accepted + 1 for played, accepted in history if played == arm]
        optimism = exploration * arm * math.sqrt(2 * math.log(len(history)) / len(emitted))
        indices.append((sum(emitted) / len(emitted) + optimism) / (arm / cost_ratio + 1))
    return arms[indices.index(max(indices))]


def test_the_bandit_tries_all_from_the_middle_outwards():
    outcomes = [(1, 0)] * 7
    assert planned(BanditLength(), outcomes)[:7] == [4, 3, 6, 2, 8, 1, 12]
    assert planned(BanditLength([8, 4, 2, 3]), outcomes)[:4] == [3, 4, 2, 8]


@pytest.mark.parametrize("exploration", [0.0, 0.3])
def test_the_bandit_takes_the_highest_index(exploration):
    rule = BanditLength((2, 4, 8), cost_ratio=5.0, exploration=exploration)
    state, history, generator = rule.start_prompt(1, torch.device("cpu")), [], torch.Generator().manual_seed(0)
    for number in range(40):
        arm = rule.planned_length(state).item()
        assert number < 3 or arm == upper_bounds((2, 4, 8), history, 5.0, exploration)
        accepted = min(arm, torch.randint(0, 5, (), generator=generator).item())
        history.append((arm, accepted))
        state = rule.start_round(rule.end_round(state, torch.tensor([arm]), torch.tensor([accepted])))
        state = rule.start_round(rule.end_round(state, torch.tensor([0]), torch.tensor([0])))
    assert {arm for arm, _ in history} == {2, 4, 8}


def test_the_bandit_finds_the_best_length():
    for accepted, best in ((0, 1), (12, 12)):
        rule = BanditLength((1, 4, 12), exploration=0.1)
        state, lengths = rule.start_prompt(1, torch.device("cpu")), []
        for _ in range(60):
            lengths.append(rule.planned_length(state).item())
            state = rule.start_round(
                rule.end_round(state, torch.tensor([lengths[-1]]), torch.tensor([min(accepted, lengths[-1])]))
            )
        assert max(set(lengths), key=lengths.count) == best


def test_a_round_cut_short_counts_for_its_planned_length():
    rule = BanditLength((2, 4, 8))
    state = rule.start_round(rule.end_round(rule.start_prompt(1, torch.device("cpu")), torch.tensor([1]), torch.tensor([1])))
    assert state.memory.plays.tolist() == [[0, 1, 0]]
    assert state.memory.emitted.tolist() == [[0, 2, 0]]


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
        (lambda: AcceptedAverage(smoothing=0), "smoothing=0"),
        (lambda: AcceptedAverage(smoothing=1.1), r"smoothing=1\.1"),
        (lambda: AcceptedAverage(extra=-1), "extra=-1"),
        (lambda: AcceptedAverage(1, extra=2), "extra=2 and start=1"),
        (lambda: BanditLength([]), "arms="),
        (lambda: BanditLength("12"), "arms=12"),
        (lambda: BanditLength([2, 2]), "arms="),
        (lambda: BanditLength([0, 2]), "arms="),
        (lambda: BanditLength(cost_ratio=0), "cost_ratio=0"),
        (lambda: BanditLength(exploration=-1), "exploration=-1"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()
