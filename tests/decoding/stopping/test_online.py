import math

import numpy as np
import pytest
import torch
from fakes import drafted_length

from specheads import AcceptanceHead, HeadConfig
from specheads.decoding.stopping import HeadThreshold, OnlineHead, OnlineLogistic

CPU = torch.device("cpu")


def features(**values):
    return {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}


def entropy_head(predicts="next_token"):
    """A head whose logit is the `entropy` that it is shown."""
    head = AcceptanceHead(
        HeadConfig(1, depth=0, predicts=predicts, inputs=("entropy",), width=1)
    ).requires_grad_(False)
    for name, value in head.named_parameters():
        value.fill_(1.0 if "weight" in name else 0.0)
    return head


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def newton(weights, information, rows, outcomes):
    """One update in plain arithmetic."""
    rows = np.array(rows).reshape(-1, len(weights))
    probs = sigmoid(rows @ weights)
    information = information + rows.T @ (rows * (probs * (1 - probs))[:, None])
    return (
        weights + np.linalg.solve(information, rows.T @ (np.array(outcomes) - probs)),
        information,
    )


def logit(prob):
    return math.log(prob / (1 - prob))


# Largest probabilities, accepted
ROUNDS = ([0.9, 0.8, 0.3, 0.6], 2), ([0.7, 0.95], 2), ([0.4], 0), ([0.5] * 6, 6), ([], 0)


def test_an_online_logistic_learns_from_tokens_with_a_known_outcome():
    rule = OnlineLogistic(slope=0.5, intercept=0.2, prior=2.0, threshold=1.0, max_tokens=6)
    state = rule.start_prompt(1, CPU)
    weights = np.array([0.5, 0.2])
    information = 2.0 * np.eye(2)
    for probs, accepted in ROUNDS:
        for prob in probs:
            state, _ = rule.step(state, features(max_prob=prob))
        state = rule.start_round(
            rule.end_round(state, torch.tensor([len(probs)]), torch.tensor([accepted]))
        )
        outcomes = [1] * accepted + [0] * (accepted < len(probs))
        if probs:
            weights, information = newton(
                weights, information, [[logit(p), 1.0] for p in probs[: len(outcomes)]], outcomes
            )
        assert state.memory.weights[0].tolist() == pytest.approx(weights.tolist(), abs=1e-12)
        assert state.memory.information[0].flatten().tolist() == pytest.approx(
            information.flatten().tolist(), abs=1e-12
        )


@pytest.mark.parametrize("predicts", ["next_token", "input_token"])
def test_an_online_head_learns_from_the_tokens_that_it_predicted(predicts):
    """A head that predicts its input token has not seen the last one of a round."""
    rule = OnlineHead(entropy_head(predicts), threshold=1.0, prior=2.0, max_tokens=6)
    state = rule.start_prompt(1, CPU)
    draw = np.random.default_rng(0)
    late = predicts == "input_token"
    weights = np.array([1.0, 0.0, 0.0])
    information = 2.0 * np.eye(3)
    for probs, accepted in ROUNDS:
        said = draw.normal(size=len(probs)).astype(np.float32).tolist()
        survival = 1.0
        for step, (prob, heard) in enumerate(zip(probs, said, strict=True)):
            state, _ = rule.step(state, features(max_prob=prob, entropy=heard))
            survival *= 1.0 if late and step == 0 else sigmoid(weights @ [heard, logit(prob), 1.0])
            assert state.survival.item() == pytest.approx(survival, abs=1e-6)
        state = rule.start_round(
            rule.end_round(state, torch.tensor([len(probs)]), torch.tensor([accepted]))
        )
        outcomes = ([1] * accepted + [0] * (accepted < len(probs)))[: max(0, len(probs) - late)]
        rows = [[heard, logit(prob), 1.0] for heard, prob in zip(said, probs, strict=True)]
        weights, information = newton(
            weights, information, rows[late : late + len(outcomes)], outcomes
        )
        assert state.memory.weights[0].tolist() == pytest.approx(weights.tolist(), abs=1e-6)
        assert state.memory.information[0].flatten().tolist() == pytest.approx(
            information.flatten().tolist(), abs=1e-5
        )


@pytest.mark.parametrize("predicts", ["next_token", "input_token"])
def test_an_online_head_begins_as_the_head_and_corrects_it(predicts):
    # 0.8 of each token
    head = entropy_head(predicts)
    values = features(entropy=math.log(4), max_prob=0.6)
    plain = HeadThreshold(head, 0.5)
    stubborn = OnlineHead(head, 0.5, prior=1e9)
    quick = OnlineHead(head, 0.5, prior=1.0)
    states = [rule.start_prompt(1, CPU) for rule in (plain, stubborn, quick)]
    lengths = []
    for _ in range(30):
        results = [
            drafted_length(rule, state, values)
            for rule, state in zip((plain, stubborn, quick), states, strict=True)
        ]
        lengths.append([count for count, _ in results])
        states = [
            # All is accepted
            rule.start_round(rule.end_round(state, torch.tensor([count]), torch.tensor([count])))
            for rule, (count, state) in zip((plain, stubborn, quick), results, strict=True)
        ]
    expected = 4 if predicts == "next_token" else 5
    assert lengths[0] == [expected] * 3
    assert all(counts[:2] == [expected] * 2 for counts in lengths)
    assert lengths[-1][2] == 20
