"""Lengths that are planned for all requests of a round."""

import numpy as np
import pytest
from load_drafts import blank, drafted, drafts_of

from specheads import UserError
from specheads.decoding.load.costs import LoadCosts, SecondsTable
from specheads.decoding.load.lengths import FixedK, FixedKByBatchSize, GoodputK

COSTS = LoadCosts(SecondsTable((1, 2), (0.1, 0.1)), SecondsTable((1, 32, 33), (1.0, 1.0, 1.1)))


def test_a_fixed_length_submits_all_that_could_be_drafted():
    policy = FixedK(3)
    drafts = drafted(policy, blank(3), capacity=[8, 2, 0])
    assert policy.admit(drafts).tolist() == drafts.lengths.tolist() == [3, 2, 0]


@pytest.mark.parametrize(("requests", "expected"), [(1, 5), (2, 5), (3, 3), (4, 3), (5, 3), (6, 0), (8, 0), (99, 0)])
def test_a_table_is_read_at_the_nearest_size_by_ratio(requests, expected):
    assert drafted(FixedKByBatchSize({8: 0, 2: 5, 4: 3}), blank(requests)).longest == expected


@pytest.mark.parametrize("lengths", [{}, {0: 1}, {1: -1}, {1: 0.5}])
def test_bad_tables_of_lengths_are_refused(lengths):
    with pytest.raises(UserError, match="must be tokens by number of requests"):
        FixedKByBatchSize(lengths)


def test_the_goodput_length_is_the_best_for_its_shares():
    """With shares of 0.8 everywhere, by the formula: R (1 + sum 0.8^k) / (0.1 K + c(R (1 + K)))."""
    for requests in (1, 4, 8, 16, 64):
        rates = [
            requests * sum(0.8**k for k in range(length + 1)) / (0.1 * length + COSTS.target(requests * (1 + length)))
            for length in range(9)
        ]
        assert drafted(GoodputK(COSTS, 0.8, 8), blank(requests)).longest == int(np.argmax(rates))


def test_goodput_drafts_less_after_rejections_and_more_after_acceptances():
    lengths = {}
    for name, share in (("rejected", 0.0), ("accepted", 1.0)):
        policy = GoodputK(COSTS, 0.6, 8)
        for _ in range(60):
            drafts = drafted(policy, blank(4))
            policy.learn(drafts, drafts.lengths, (share * drafts.lengths).astype(int), 1.0)
        lengths[name] = drafted(policy, blank(4)).longest
    assert lengths["rejected"] < drafted(GoodputK(COSTS, 0.6, 8), blank(4)).longest < lengths["accepted"] == 7


def test_goodput_counts_only_what_verification_decided():
    policy = GoodputK(COSTS, 0.5, 4)
    drafts = drafts_of(blank(2, 3), lengths=[3, 3])
    policy.learn(drafts, np.array([3, 1]), np.array([1, 1]), 1.0)
    assert policy.tried.tolist() == [2.0, 1.0, 0.0, 0.0] and policy.accepted.tolist() == [2.0, 0.0, 0.0, 0.0]
