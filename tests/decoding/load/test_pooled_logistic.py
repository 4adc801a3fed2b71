"""The pooled logistic."""

import numpy as np
import pytest
from load_drafts import drafted, drafts_of

from specheads import UserError
from specheads.decoding.load.pooled_logistic import PooledLogistic


def test_rows_stop_where_the_product_of_probabilities_falls_below_the_cut():
    """At first the logistic is the largest probability itself."""
    policy = PooledLogistic(threshold=0.5)
    probs = [[0.9, 0.8, 0.6, 0.9], [0.4, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]]
    drafts = drafted(policy, {"max_prob": probs})
    assert drafts.lengths.tolist() == [3, 1, 4]  # the token that falls below was drafted
    assert policy.admit(drafts).tolist() == [2, 0, 4]  # and is not submitted


def test_it_learns_the_logistic_that_outcomes_follow():
    """False alarm below 1e-6: six standard errors of a fit to 20,000 tokens are about 0.12 of each weight."""
    rng, policy = np.random.default_rng(0), PooledLogistic(threshold=1.0, prior=1.0)
    for _ in range(500):
        probs = rng.uniform(0.05, 0.95, size=(40, 1))
        chance = 1 / (1 + np.exp(-(-0.7 + 0.6 * np.log(probs / (1 - probs)))))
        drafts = drafts_of({"max_prob": probs})
        policy.learn(drafts, drafts.lengths, (rng.random((40, 1)) < chance).sum(axis=1), 1.0)
    assert policy.weights == pytest.approx([-0.7, 0.6], abs=0.12)


def test_tokens_without_an_outcome_teach_nothing():
    policy = PooledLogistic()
    drafts = drafts_of({"max_prob": [[0.5, 0.5, 0.5]]})
    policy.learn(drafts, np.array([0]), np.array([0]), 1.0)
    assert policy.weights.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("arguments", [{"threshold": 1.5}, {"prior": 0.0}, {"max_tokens": -1}])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(UserError, match=next(iter(arguments))):
        PooledLogistic(**arguments)
