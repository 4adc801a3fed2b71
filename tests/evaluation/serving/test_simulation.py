"""The simulation: seconds computed by hand, and the rounds of replay."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_recording import random_recording

from specheads import UserError
from specheads.decoding import stopping
from specheads.decoding.load.bandit import BatchSizeBandit
from specheads.decoding.load.costs import LoadCosts, SecondsTable
from specheads.decoding.load.lengths import FixedK, GoodputK
from specheads.decoding.load.load_aware import LoadAware
from specheads.decoding.load.pooled_logistic import PooledLogistic
from specheads.decoding.load.stopping_rule import EachByRule
from specheads.decoding.load.tetris import Tetris
from specheads.evaluation.serving.readouts import confidence_read_out, survival_sample
from specheads.evaluation.serving.recorded_drafts import RecordedDrafts
from specheads.evaluation.serving.results import result_of
from specheads.evaluation.serving.simulation import Simulation
from specheads.evaluation.serving.traffic import Traffic, closed_loop
from specheads.replay.replay import replay

LINEAR = LoadCosts(SecondsTable((1, 2), (1.0, 2.0)), SecondsTable((1, 2), (11.0, 12.0)))  # n and 10 + n seconds


def four_tokens():
    """One response of four tokens after a prompt of three; the second token is rejected."""
    recording = random_recording(1, 1, acceptance=1.0)
    branch_length = torch.zeros((1, 4), dtype=torch.long)
    branch_length[0, 1] = 2
    return replace(
        recording,
        prompts=[[0, 0, 0]],
        lengths=torch.tensor([4]),
        limits=torch.tensor([4]),
        finished=torch.tensor([False]),
        accepted=torch.tensor([[True, False, True, True]]),
        branch_first=torch.full((1, 4), 4),
        branch_length=branch_length,
        tokens=torch.zeros(6, dtype=torch.long),
        features={name: values[:6] for name, values in recording.features.items()},
    )


def traffic(prompts, samples, arrivals, max_batch):
    count = len(prompts)
    return Traffic(np.array(prompts), np.array(samples), np.zeros(count, dtype=int), max_batch, np.array(arrivals))


def served(recording, requests, policy, costs=LINEAR):
    return Simulation(RecordedDrafts(recording, policy.needs), requests, costs, policy).run()


def test_one_request_by_hand():
    result = served(four_tokens(), traffic([0], [0], [0.5], 1), FixedK(2))
    prompt = 0.5 + (10 + 2)  # all of the prompt but its last token
    first = prompt + (3 + 1) + (10 + 3)  # the draft reads the prompt, then one token; a and a rejected one are verified
    second = first + 1 + (10 + 2)  # one token may be drafted before the limit, and is accepted
    assert result.first_token.tolist() == [first] and result.finished.tolist() == [second]
    rounds = [(r.requests, r.steps, r.drafted, r.submitted, r.accepted, r.tokens) for r in result.rounds]
    assert rounds == [(0, 0, 0, 0, 0, 0), (1, 2, 2, 2, 1, 2), (1, 1, 1, 1, 1, 2)]


def test_a_second_request_joins_with_its_prompt_in_the_next_verification():
    result = served(four_tokens(), traffic([0, 0], [0, 0], [0.5, 20.0], 2), FixedK(2))
    assert result.admitted.tolist() == [0.5, 29.5]
    first = 29.5 + 1 + (10 + 2 + 2)
    assert result.finished.tolist() == [first, first + (3 + 1) + 13 + 1 + 12]


def test_a_full_batch_lets_requests_wait():
    result = served(four_tokens(), traffic([0, 0], [0, 0], [0.5, 1.0], 1), FixedK(2))
    assert result.admitted.tolist() == [0.5, result.finished[0]]
    assert result.arrived.tolist() == [0.5, 1.0]


def test_the_draft_reads_later_what_it_did_not_read():
    """After a round without drafts it has two more tokens to read than after one with a draft that was rejected at once."""

    class Second(FixedK):
        def length(self, drafts):
            self.seen = [*getattr(self, "seen", []), drafts.unread.tolist()]
            return 0 if len(self.seen) == 1 else 1

    policy = Second(1)
    result = served(four_tokens(), traffic([0], [0], [0.0], 1), policy)
    assert policy.seen[:2] == [[3], [4]]
    assert [r.seconds for r in result.rounds[1:3]] == [11.0, 4 + 12.0]


def test_a_draft_that_was_accepted_whole_leaves_two_tokens_to_read():
    recording = replace(four_tokens(), accepted=torch.ones((1, 4), dtype=torch.bool))
    result = served(recording, traffic([0], [0], [0.0], 1), FixedK(1))
    assert [r.seconds for r in result.rounds] == [12.0, 3 + 12.0, 2 + 12.0]


def rounds_of(replayed, prompt, sample):
    rows = np.flatnonzero((replayed.prompt == prompt) & (replayed.sample == sample))
    rows = rows[np.argsort(replayed.start[rows])]
    return list(zip(*(column[rows].tolist() for column in (replayed.drafted, replayed.accepted, replayed.tokens)), strict=True))


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        *((lambda k=k: FixedK(k), stopping.FixedLength(k)) for k in (1, 3, 8)),
        *((lambda r=r: EachByRule(r), r) for r in (stopping.MaxProbability(0.5, 8), stopping.DraftProduct(0.8, 1, 8))),
        (lambda: EachByRule(stopping.OnlineLogistic(max_tokens=8)), stopping.OnlineLogistic(max_tokens=8)),
    ],
)
def test_one_request_after_another_has_the_rounds_of_replay(policy, rule):
    recording = random_recording()
    (replayed,) = replay(recording, [rule])
    seen = set()
    for prompt in range(recording.num_prompts):
        for sample in range(recording.num_samples):
            result = served(recording, traffic([prompt], [sample], [0.0], 1), policy())
            rounds = [(r.drafted, r.accepted, r.tokens) for r in result.rounds if r.requests]
            assert rounds == rounds_of(replayed, prompt, sample)
            seen |= set(rounds)
    assert len(seen) >= 3


def test_requests_that_are_served_together_have_the_counts_of_replay():
    """Rules that decide by the request alone, in a batch that changes all the time."""
    recording = random_recording(num_prompts=9)
    prompts, samples = np.tile(np.arange(9), 2), np.repeat(np.arange(2), 9)
    for policy, rule in (
        (FixedK(3), stopping.FixedLength(3)),
        (EachByRule(stopping.OnlineLogistic(max_tokens=6)), stopping.OnlineLogistic(max_tokens=6)),
    ):
        result = served(recording, traffic(prompts, samples, np.arange(18) * 30.0, 4), policy)
        counts = replay(recording, [rule])[0].per_prompt(9)
        assert max(r.requests for r in result.rounds) == 4
        for name, expected in (("drafted", counts.drafted), ("accepted", counts.accepted), ("tokens", counts.tokens)):
            assert sum(getattr(r, name) for r in result.rounds) == expected.sum()
        assert result.target_steps.sum() == counts.target_calls.sum()


COSTS = LoadCosts(SecondsTable((1, 12, 20), (0.5, 0.5, 0.7)), SecondsTable((1, 12, 20), (2.0, 2.0, 3.6)))


def policies(recording):
    read_out = confidence_read_out(recording)
    sample = survival_sample(recording, read_out, 6)
    return [
        FixedK(0),
        FixedK(4),
        GoodputK(COSTS, max_tokens=6),
        BatchSizeBandit(),
        PooledLogistic(max_tokens=6),
        Tetris(4, 4),
        LoadAware(COSTS, read_out, sample, 6),
    ]


def test_every_policy_emits_all_tokens_of_all_requests():
    recording = random_recording(num_prompts=12)
    requests = closed_loop(recording, 5, 30, seed=1)
    whole = recording.lengths.numpy()[requests.prompts] - requests.starts
    for policy in policies(recording):
        result = served(recording, requests, policy, COSTS)
        assert sum(r.tokens for r in result.rounds) == whole.sum(), type(policy).__name__
        assert not np.isnan(result.finished).any()
        assert (np.diff([r.end for r in result.rounds]) > 0).all()
        assert all(r.accepted <= r.submitted <= r.drafted for r in result.rounds)


def test_runs_with_equal_seeds_are_equal_and_others_are_not():
    recording = random_recording(num_prompts=12)
    results = []
    for seed in (1, 1, 2):
        requests = closed_loop(recording, 5, 30, seed=seed)
        result = served(recording, requests, policies(recording)[-1], COSTS)
        results.append(result_of(result, requests, recording.lengths.numpy()))
    assert results[0] == results[1] != results[2]


class Resting(FixedK):
    """Rests while a second request is there; a round that rests has no other calls."""

    def __init__(self):
        super().__init__(2)
        self.asked = []

    def rests(self, num_requests, positions=0):
        self.asked.append(num_requests)
        return num_requests > 1

    def begin_round(self, drafts):
        assert drafts.num_requests == 1 or drafts.prompt_tokens
        return super().begin_round(drafts)

    def learn(self, drafts, num_submitted, num_accepted, seconds):
        assert drafts.num_requests == 1 or drafts.prompt_tokens


def test_a_policy_that_rests_is_asked_nothing_else():
    policy = Resting()
    result = served(random_recording(3, 1), traffic([0, 1, 2], [0, 0, 0], [0.0, 0.0, 0.0], 2), policy)
    assert {1, 2} == set(policy.asked)
    assert all(r.steps == 0 and r.tokens == 2 for r in result.rounds if r.requests == 2 and r.steps == 0)
    assert any(r.steps == 0 for r in result.rounds if r.requests == 2) and any(r.steps for r in result.rounds if r.requests == 1)
    assert np.isfinite(result.finished).all()


def test_a_policy_that_drafts_more_than_was_recorded_is_refused():
    with pytest.raises(UserError, match="up to 9 tokens, but 8 are recorded"):
        served(random_recording(), traffic([0], [0], [0.0], 1), FixedK(9))


def test_a_feature_that_was_not_recorded_is_refused():
    with pytest.raises(UserError, match="has no hidden"):
        RecordedDrafts(random_recording(), {"hidden"})
