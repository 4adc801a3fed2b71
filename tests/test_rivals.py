"""Rules of other papers, by hand."""

import numpy as np
import pytest
import torch
from random_recording import random_recording

from benchmarks.rival_rules import RIVALS, BestPolicy, GoodputLength, PooledLogistic, SpecKV, TapOut, first_tokens
from specheads.commands.evaluation import rule_choices
from specheads.decoding.stopping import FixedLength, OnlineLogistic
from specheads.evaluation.candidates import check_rules
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.tuning import Tuning
from specheads.replay.cost import Costs
from specheads.replay.recording import GROUND_TRUTH
from specheads.replay.replay import replay

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


def lengths(num_drafted, num_accepted):
    return torch.tensor(num_drafted), torch.tensor(num_accepted)


def test_goodput_takes_the_best_length_by_what_all_requests_accepted():
    rule = GoodputLength(Costs.at_ratio(10), max_tokens=6)
    state = rule.start_round(rule.start_prompt(2, CPU))
    state = rule.end_round(state, *lengths([4, 4], [4, 1]))  # accepted 2 of 2, 1 of 2, 1 of 1, 1 of 1, and nothing known beyond
    speeds = [(1 + 1) / 1.1, *((2 + 0.5 * (k - 1)) / (1 + k / 10) for k in range(2, 7))]
    assert state.num_tokens.tolist() == [1 + int(np.argmax(speeds))] * 2
    state = rule.end_round(rule.start_round(state), *lengths([6, 6], [0, 0]))  # now 2 of 4 first tokens
    speeds = [1 + 0.5, *(1.5 + 0.25 * (k - 1) for k in range(2, 7))]
    assert state.num_tokens.tolist() == [1 + int(np.argmax([each / (1 + k / 10) for k, each in enumerate(speeds, 1)]))] * 2


def test_a_pooled_logistic_is_one_logistic_that_reads_all_requests():
    torch.manual_seed(0)
    pooled, alone = PooledLogistic(max_tokens=5), OnlineLogistic(max_tokens=5)
    ours, theirs = pooled.start_prompt(1, CPU), alone.start_prompt(1, CPU)
    for accepted in (3, 0, 1):
        rounds = [pooled.start_round(ours), alone.start_round(theirs)]
        for probability in torch.rand(4):
            rounds = [
                rule.step(state, {"max_prob": probability[None]})[0] for rule, state in zip((pooled, alone), rounds, strict=True)
            ]
        ours, theirs = (
            rule.end_round(state, *lengths([4], [accepted])) for rule, state in zip((pooled, alone), rounds, strict=True)
        )
        assert torch.allclose(ours.memory.weights, theirs.memory.weights)
    # A request that comes later begins with what the others taught, once its first round has ended.
    late = pooled.start_round(pooled.start_prompt(1, CPU))
    late, _ = pooled.step(late, {"max_prob": torch.tensor([0.9])})
    before = ours.memory.weights
    after = pooled.end_round(late, *lengths([1], [1])).memory.weights
    assert 0 < (after - before).abs().max() < (after - torch.tensor([[1.0, 0.0]])).abs().max()


def test_first_tokens_are_read_with_the_tokens_that_follow_them():
    recording = random_recording()
    inputs, run = first_tokens(recording, longest=4)
    expected = []
    for sample in range(recording.num_samples):
        for first, length in zip(recording.first.tolist(), recording.lengths.tolist(), strict=True):
            for position in range(first, first + length):
                flags = recording.accepted[sample, position : first + length].tolist()
                accepted = flags.index(False) if False in flags else len(flags)
                if not flags[0] and not recording.branch_length[sample, position]:
                    continue
                node = position if flags[0] else int(recording.branch_first[sample, position])
                expected.append((float(recording.features["entropy"][node]), min(accepted, 4)))
    assert run.tolist() == [accepted for _, accepted in expected]
    assert inputs[:, 2].tolist() == pytest.approx([entropy for entropy, _ in expected])


def tuning(recording, ratio):
    return Tuning(recording, CostTable({str(ratio): Costs.at_ratio(ratio)}))


def test_speckv_drafts_what_its_network_expects_to_pay():
    recording = random_recording(num_prompts=40, seed=3)
    arguments = SpecKV.fit({"network": "fitted", "max_tokens": 8}, tuning(recording, 10), None, Costs.at_ratio(10))
    rule = SpecKV(**arguments)
    features = {name: torch.tensor([0.3, 0.9]) for name in ("draft_prob", "max_prob", "entropy")}
    state, stop = rule.step(rule.start_round(rule.start_prompt(2, CPU)), features)
    inputs = torch.stack([torch.tensor(each).log() for each in (0.3, 0.9)])
    inputs = torch.stack([inputs, torch.tensor([0.3, 0.9]).logit(), torch.tensor([0.3, 0.9])], dim=1).double()
    survival = rule.network(inputs).sigmoid().cumprod(dim=1)
    worth = [[float(row[:k].sum()) - rule.throughput * k / 10 for k in range(1, 9)] for row in survival]
    assert state.num_tokens.tolist() == [1 + int(np.argmax(row)) for row in worth]
    assert stop.tolist() == [length == 1 for length in state.num_tokens.tolist()]
    # Later tokens of the round do not change it.
    later, _ = rule.step(state, {name: value.flip(0) for name, value in features.items()})
    assert later.num_tokens.tolist() == state.num_tokens.tolist()


@pytest.mark.parametrize("ratio", [3, 10])
def test_the_best_policy_on_equal_tokens_is_the_best_fixed_length(ratio):
    recording = random_recording(num_prompts=10, acceptance=0.7)
    recording.features[GROUND_TRUTH] = torch.full_like(recording.features["max_prob"], 0.7)
    costs = Costs.at_ratio(ratio)
    rule = BestPolicy(**BestPolicy.fit({"max_tokens": 8}, tuning(recording, ratio), None, costs))
    speeds = [(1 - 0.7 ** (k + 1)) / 0.3 / (1 + k / ratio) for k in range(1, 9)]
    (ours, fixed) = replay(recording, [rule, FixedLength(1 + int(np.argmax(speeds)))])
    assert sorted(zip(ours.start, ours.drafted, strict=True)) == sorted(zip(fixed.start, fixed.drafted, strict=True))


def test_configs_name_classes_that_exist():
    choices = rule_choices(RIVALS)
    assert {name: choice.cls.__name__ for name, choice in choices.items()} == {
        "tapout": "TapOut",
        "speckv": "SpecKV",
        "goodput_length": "GoodputLength",
        "pooled_logistic": "PooledLogistic",
        "best_head_policy": "BestHeadPolicy",
        "best_policy": "BestPolicy",
    }
    check_rules(choices)  # raises for values that a rule refuses
