import pytest
import torch
from fakes import constant_head

from specheads import UserError
from specheads.decoding.stopping import FixedLength, HeadThreshold


def lengths(rule, num_steps=30, batch=1, rounds=1):
    """How many tokens each round drafts until every row has been told to stop."""
    state, found = rule.init(batch, torch.device("cpu")), []
    for _ in range(rounds):
        stopped = torch.zeros(batch, dtype=torch.long)
        for step in range(1, num_steps + 1):
            state, stop = rule.step(state, {"hidden": torch.zeros(batch, 1)})
            stopped = torch.where(stop & (stopped == 0), step, stopped)
        state = rule.observe(state, stopped, stopped)
        found.append(stopped.tolist())
    return found


@pytest.mark.parametrize("k", [1, 2, 7])
def test_fixed_length_drafts_k_tokens_in_every_round(k):
    assert lengths(FixedLength(k), batch=2, rounds=3) == [[k, k]] * 3


# 1 - 0.8^n > 0.5 first holds for n = 4 judged tokens
@pytest.mark.parametrize("judges, expected", [("next_token", 4), ("input_token", 5)])
def test_a_threshold_stops_once_some_rejection_is_likely(judges, expected):
    assert lengths(HeadThreshold(constant_head(0.8, judges), 0.5), rounds=2) == [[expected]] * 2


@pytest.mark.parametrize("judges, smallest", [("next_token", 1), ("input_token", 2)])
def test_the_default_bounds_are_those_of_the_kind(judges, smallest):
    assert lengths(HeadThreshold(constant_head(1e-6, judges), 0.1)) == [[smallest]]
    assert lengths(HeadThreshold(constant_head(1 - 1e-9, judges), 0.9)) == [[20]]


def test_threshold_one_never_stops_before_the_maximum():
    assert lengths(HeadThreshold(constant_head(0.0), 1.0, max_tokens=9)) == [[9]]


def test_threshold_zero_stops_at_the_first_doubt():
    assert lengths(HeadThreshold(constant_head(0.999), 0.0, min_tokens=3)) == [[3]]


def test_rows_stop_independently():
    def head(features):
        return features["hidden"][:, 0]

    head.config = constant_head(0.5).config
    rule = HeadThreshold(head, 0.5)
    state = rule.init(2, torch.device("cpu"))
    _, stop = rule.step(state, {"hidden": torch.tensor([[3.0], [-3.0]])})
    assert stop.tolist() == [False, True]


@pytest.mark.parametrize("threshold", [-0.1, 1.01, float("nan")])
def test_a_threshold_that_is_no_probability_is_refused(threshold):
    with pytest.raises(UserError, match="threshold"):
        HeadThreshold(constant_head(0.5), threshold)


def test_bounds_out_of_order_are_refused():
    with pytest.raises(UserError, match="min_tokens=5 and max_tokens=4"):
        HeadThreshold(constant_head(0.5), 0.5, min_tokens=5, max_tokens=4)
    with pytest.raises(UserError, match="num_tokens=0"):
        FixedLength(0)
