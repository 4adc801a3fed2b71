"""The load-aware policies."""

from dataclasses import replace

import numpy as np
from load_drafts import drafted

from specheads.decoding.load.admission import frontier
from specheads.decoding.load.costs import LoadCosts, SecondsTable
from specheads.decoding.load.lengths import FixedK
from specheads.decoding.load.load_aware import LoadAware, LoadBound
from specheads.decoding.load.plan import SurvivalSample
from specheads.decoding.load.readout import LogisticAcceptance, ReadOut
from specheads.decoding.load.roofline import roofline

# The logit of the largest probability as it is: a prediction is that probability.
READ_OUT = ReadOut(*(LogisticAcceptance({"logit_max_prob": 1.0, "bias": 0.0}) for _ in range(2)))
RNG = np.random.default_rng(0)
SAMPLE = SurvivalSample(RNG.uniform(0.3, 0.95, size=(200, 6)).cumprod(axis=1))
COSTS = roofline("h200", "8B", "1B")


def features(requests, seed=0):
    return {"max_prob": np.random.default_rng(seed).uniform(0.3, 0.95, size=(requests, 6))}


def test_everything_is_submitted_at_low_load_and_nothing_is_drafted_at_high_load():
    for requests in (1, 4, 256, 400):
        policy = LoadAware(COSTS, READ_OUT, SAMPLE, 6)
        drafts = drafted(policy, features(requests))
        assert policy.admit(drafts).tolist() == drafts.lengths.tolist()
        assert (drafts.longest > 0) == (requests < 256)


def test_in_between_the_frontier_is_submitted():
    policy = LoadAware(COSTS, READ_OUT, SAMPLE, 6)
    drafts = drafted(policy, features(80))
    submitted = policy.admit(drafts)
    assert 0 < submitted.sum() < drafts.lengths.sum()
    expected = frontier(READ_OUT.survival(drafts), drafts.lengths, COSTS.envelope, 80, throughput=policy.plan.throughput)
    assert submitted.tolist() == expected.tolist()


def test_where_verification_is_free_good_drafts_are_deeper_than_bad_ones():
    depths = [drafted(LoadAware(COSTS, READ_OUT, SAMPLE, 6), {"max_prob": np.full((2, 6), p)}).longest for p in (0.2, 0.6, 0.95)]
    assert depths == sorted(depths) and depths[0] == 1 and depths[-1] == 6


def test_prompts_in_the_same_step_take_the_place_of_drafts():
    policy = LoadAware(COSTS, READ_OUT, SAMPLE, 6)
    numbers = [policy.admit(drafted(policy, features(48), prompt_tokens=tokens)).sum() for tokens in (0, 60, 300)]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] > numbers[1] and numbers[2] == 0


def rounds(policy, requests, count):
    """Return the depths of rounds in which all that is submitted is accepted."""
    depths = []
    for number in range(count):
        drafts = drafted(policy, features(requests, number), unread=1 if policy.drafting else 50)
        submitted = policy.admit(drafts)
        policy.learn(drafts, submitted, submitted, 1.0)
        depths.append(drafts.longest)
    return depths


def test_drafts_end_where_their_reading_costs_more_than_they_add_and_begin_again_at_lower_load():
    """A draft that is fast up to 64 tokens and slow beyond: 60 requests emit more than that in every round."""
    slow = LoadCosts(SecondsTable((1, 64, 65), (0.0005, 0.0005, 0.001)), COSTS.target)
    policy = LoadAware(slow, READ_OUT, SAMPLE, 6)
    depths = rounds(policy, 60, 200)
    assert depths[0] > 0 and depths[-1] == 0 and not policy.drafting
    assert rounds(policy, 2, 100)[-1] > 0 and policy.drafting


def test_the_bound_submits_no_more_than_the_other_policy_and_no_more_than_pays():
    for requests, fewer in ((4, False), (64, True), (256, True)):
        policy = LoadBound(FixedK(3), COSTS, READ_OUT, SAMPLE)
        drafts = drafted(policy, features(requests))
        submitted = policy.admit(drafts)
        assert drafts.longest == 3
        assert (submitted <= 3).all() and (submitted.sum() < 3 * requests) == fewer


def test_what_is_drafted_is_submitted_unseen_where_weighing_takes_too_long():
    slow = replace(COSTS, admission=SecondsTable((1, 2), (1.0, 1.0)))
    policy = LoadAware(slow, READ_OUT, SAMPLE, 6)
    drafts = drafted(policy, features(64))
    assert drafts.longest and not policy.admits
    assert policy.admit(drafts).tolist() == drafts.lengths.tolist()
