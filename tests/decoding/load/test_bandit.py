"""The bandit by batch size."""

import pytest
from load_drafts import blank, drafted

from specheads import UserError
from specheads.decoding.load.bandit import BatchSizeBandit

BEST = {2: 4, 40: 0}  # by batch size, the length with the most tokens per second


def seconds(requests, length):
    return requests * (1 + 0.3 * abs(length - BEST[requests]))


def test_it_finds_the_best_length_of_each_batch_size():
    policy, played = BatchSizeBandit((0, 1, 2, 4, 8), seed=0), {2: [], 40: []}
    for number in range(1600):
        requests = 2 if number % 2 else 40
        drafts = drafted(policy, blank(requests))
        played[requests].append(drafts.longest)
        policy.learn(drafts, drafts.lengths, 0 * drafts.lengths, seconds(requests, drafts.longest))
    for requests, lengths in played.items():
        assert set(lengths[:20]) == {0, 1, 2, 4, 8}  # each is tried first, for a bin
        assert lengths[:4] == [0] * 4
        assert lengths[-200:].count(BEST[requests]) > 140


def test_a_round_has_one_length_however_often_it_is_asked_for():
    policy = BatchSizeBandit((0, 3, 5), seed=1)
    for _ in range(200):
        drafts = drafted(policy, blank(3))
        assert len(set(drafts.lengths.tolist())) == 1 and drafts.longest in (0, 3, 5)
        policy.learn(drafts, drafts.lengths, drafts.lengths, 1.0)


@pytest.mark.parametrize("arms", [(), (1, 1), (-1,), (0.5,)])
def test_bad_arms_are_refused(arms):
    with pytest.raises(UserError, match="must be different non-negative integers"):
        BatchSizeBandit(arms)
