"""Rules of other papers, by hand."""

import pytest
import torch

from benchmarks.rivals import RIVALS, TapOut
from specheads.commands.evaluation import rule_choices

CPU = torch.device("cpu")


def features(max_prob, entropy):
    return {"max_prob": torch.tensor([max_prob]), "entropy": torch.tensor([entropy])}


def drafted(rule, state, tokens):
    """Return how many of `tokens` (max_prob, entropy) a round drafts, and the state after it."""
    state = rule.start_round(state)
    for count, token in enumerate(tokens, start=1):
        state, stop = rule.step(state, features(*token))
        if stop:
            return count, state
    return len(tokens), state


def test_every_rule_is_tried_once_and_then_the_best_one_is_played():
    rule, arms, lengths = TapOut(blend=0.0, max_tokens=8), [], []
    state = rule.start_prompt(1, CPU)
    # The second token is unlikely, the third has a rise of the entropy's root by 0.3, the fourth one above 0.6.
    tokens = [(0.9, 0.01), (0.7, 0.04), (0.9, 0.25), (0.9, 0.37), (0.9, 0.37)]
    for _ in range(40):
        arms.append(int(state.memory.arm))
        count, state = drafted(rule, state, tokens)
        lengths.append(count)
        accepted = min(count, 2)  # the first two tokens are right
        state = rule.end_round(state, torch.tensor([count]), torch.tensor([accepted]))
    assert arms[:3] == [0, 1, 2] and lengths[:3] == [2, 4, 3]
    assert max(arms.count(arm) for arm in range(3)) == arms.count(0)  # 2 of 2 accepted, the others 2 of 4 and 2 of 3
    assert state.memory.plays.sum() == 40


@pytest.mark.parametrize(("blend", "reward"), [(0.0, 2 / 3), (1.0, 2 / 8), (0.5, (2 / 3 + 2 / 8) / 2)])
def test_the_reward_blends_both_shares(blend, reward):
    rule = TapOut(blend, max_tokens=8)
    state = rule.end_round(rule.start_prompt(1, CPU), torch.tensor([3]), torch.tensor([2]))
    assert state.memory.rewards[0].tolist() == pytest.approx([reward, 0, 0])


def test_a_round_does_not_see_the_entropy_of_the_last_one():
    rule = TapOut()
    state = rule.start_prompt(1, CPU)
    state = state._replace(memory=state.memory._replace(arm=torch.tensor([2])))
    _, state = drafted(rule, state, [(0.9, 0.0)])
    count, _ = drafted(rule, state, [(0.9, 0.3), (0.9, 0.3)])
    assert count == 2


def test_configs_name_classes_that_exist():
    choices = rule_choices(RIVALS)
    assert [choice.cls for choice in choices.values()] == [TapOut]
    rules = [TapOut(blend, choices["tapout"].arguments["max_tokens"]) for blend in choices["tapout"].arguments["blend"]]
    assert [rule.blend for rule in rules] == [0.0, 0.5, 1.0]
