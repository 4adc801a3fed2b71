"""Stopping rules of single requests in a batch that changes."""

import numpy as np
from load_drafts import drafted

from specheads.decoding.load.stopping_rule import EachByRule
from specheads.decoding.stopping import Heuristic, MaxProbability


def test_every_row_stops_where_the_rule_stops_it():
    policy = EachByRule(MaxProbability(0.5, 4))
    probs = [[0.9, 0.4, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9], [0.3, 0.9, 0.9, 0.9]]
    assert drafted(policy, {"max_prob": probs}).lengths.tolist() == [2, 4, 1]


def test_requests_keep_their_state_while_the_batch_changes_and_lose_it_when_they_leave():
    policy, features = EachByRule(Heuristic(start=3, increase=2, decrease=1, max_tokens=8)), {"max_prob": np.full((2, 8), 0.5)}
    first = drafted(policy, features, requests=[7, 4])
    assert first.lengths.tolist() == [3, 3]
    policy.learn(first, first.lengths, np.array([3, 1]), 1.0)
    second = drafted(policy, features, requests=[4, 9])
    assert second.lengths.tolist() == [2, 3]  # 4 was rejected and moved to the front; 9 is new
    policy.learn(second, second.lengths, np.array([2, 0]), 1.0)
    assert drafted(policy, features, requests=[7, 4]).lengths.tolist() == [3, 4]


def test_a_round_in_which_nobody_can_draft_begins_and_ends_like_any_other():
    policy, features = EachByRule(Heuristic(start=3)), {"max_prob": np.full((2, 8), 0.5)}
    drafts = drafted(policy, features, requests=[7, 4])
    policy.learn(drafts, drafts.lengths, drafts.lengths, 1.0)
    alone = drafted(policy, {"max_prob": np.full((1, 8), 0.5)}, requests=[4], capacity=[0])
    policy.learn(alone, alone.lengths, alone.lengths, 1.0)
    assert drafted(policy, features, requests=[4, 5]).lengths.tolist() == [5, 3]
