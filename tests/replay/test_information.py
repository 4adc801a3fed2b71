"""The reducible uncertainty of acceptance, and what predictors explain of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_recording import random_recording

from specheads.replay.information import LOGISTIC, _nats, information
from specheads.replay.intervals import resample_counts
from specheads.replay.recording import GROUND_TRUTH
from specheads.replay.replay import RecordedHead

PROMPTS = 300


def entropy(p):
    return -p * np.log(p) - (1 - p) * np.log(1 - p)


@pytest.fixture(scope="module")
def recording():
    """Tokens are accepted with probability 0.9 or 0.2.

    Heads know which, know nothing, or know it half of the time.
    """
    made = random_recording(num_prompts=PROMPTS, num_samples=1, seed=3)
    generator = torch.Generator().manual_seed(0)
    truth = torch.where(torch.rand(len(made.tokens), generator=generator) < 0.6, 0.9, 0.2)
    told = torch.rand(len(truth), generator=generator) < 0.5
    made.features.update(
        {GROUND_TRUTH: truth, "knows": truth.logit(), "blind": torch.zeros(len(truth))}
    )
    made.features["half"] = torch.where(told, truth.logit(), torch.tensor(0.62).logit())
    made.features["too sure"] = 3 * truth.logit() + 1
    return made


@pytest.fixture(scope="module")
def found(recording):
    heads = {
        name: RecordedHead(name, "next_token") for name in ("knows", "blind", "half", "too sure")
    }
    return information([recording], heads, range(PROMPTS))


def test_entropy_and_noise_are_those_of_the_true_probabilities(recording, found):
    truth = recording.features[GROUND_TRUTH][recording.labels()[0]].double().numpy()
    assert found.num_tokens == len(truth)
    assert found.entropy.value == pytest.approx(entropy(truth.mean()))
    assert found.irreducible.value == pytest.approx(entropy(truth).mean())
    assert found.reducible.value == pytest.approx(found.entropy.value - found.irreducible.value)
    assert found.reducible.low < found.reducible.value < found.reducible.high


def test_a_predictor_explains_what_it_knows(found):
    shares = {name: each.value for name, each in found.explained.items()}
    # Slope and offset are fitted
    assert shares["knows"] == pytest.approx(1, abs=1e-3) == shares["too sure"]
    assert shares["blind"] == pytest.approx(0, abs=2e-3) and shares[LOGISTIC] == pytest.approx(
        0, abs=5e-3
    )
    # Half of the tokens are told, and the prior of the others is theirs: half of what can be known.
    assert shares["half"] == pytest.approx(0.5, abs=0.02)


def test_recordings_are_taken_together(recording):
    heads = {"knows": RecordedHead("knows", "next_token")}
    twice = information([recording, recording], heads, range(2 * PROMPTS))
    once = information([recording], heads, range(PROMPTS))
    assert twice.num_tokens == 2 * once.num_tokens and twice.irreducible.value == pytest.approx(
        once.irreducible.value
    )
    assert twice.reducible.high - twice.reducible.low < once.reducible.high - once.reducible.low


def test_a_head_that_reads_the_token_is_measured_on_what_it_reads(recording):
    found = information(
        [recording], {"knows": RecordedHead("knows", "input_token")}, range(PROMPTS)
    )
    # It predicts one node later, where what it "knows" is another token's chance.
    assert found.explained["knows"].value == pytest.approx(0, abs=0.02)


def test_where_nothing_can_be_known_there_is_no_information(recording):
    sure = replace(
        recording,
        features=recording.features
        | {GROUND_TRUTH: torch.full_like(recording.features["knows"], 0.7)},
    )
    assert information([sure], {}, range(PROMPTS)) is None


def test_what_a_predictor_explains_over_the_logistic_is_the_difference_of_both(recording):
    sure = replace(
        recording, features=recording.features | {"max_prob": recording.features[GROUND_TRUTH]}
    )
    found = information(
        [sure],
        {name: RecordedHead(name, "next_token") for name in ("knows", "blind")},
        range(PROMPTS),
    )
    assert found.explained[LOGISTIC].value == pytest.approx(1, abs=1e-3) and set(
        found.over_logistic
    ) == {"knows", "blind"}
    assert found.over_logistic["knows"].value == pytest.approx(0, abs=1e-3)
    assert (
        found.over_logistic["blind"].value == pytest.approx(-1, abs=5e-3)
        and found.over_logistic["blind"].high < -0.99
    )


def test_of_several_heads_each_is_compared_with_the_logistic_by_a_wider_interval(recording):
    heads = {name: RecordedHead(name, "next_token") for name in ("knows", "blind")}
    one, two = (
        information([recording], which, range(PROMPTS))
        for which in ({"knows": heads["knows"]}, heads)
    )
    assert one.explained["knows"] == two.explained["knows"]
    assert one.over_logistic["knows"].value == two.over_logistic["knows"].value
    assert two.over_logistic["knows"].low < one.over_logistic["knows"].low
    assert two.over_logistic["knows"].high > one.over_logistic["knows"].high


def test_resamples_in_which_nothing_can_be_known_are_left_out():
    """One prompt alone differs from the others, and the first resample lacks it."""
    made = random_recording(num_prompts=12, num_samples=1, seed=3)
    prompts = range(12)
    odd = int(np.flatnonzero(resample_counts(prompts)[1] == 0)[0])
    prompt = made.prompt_of(torch.arange(len(made.tokens)))
    made.features[GROUND_TRUTH] = torch.where(prompt == odd, 0.9, 0.2)
    found = information([made], {}, prompts)
    assert found.reducible.low > 0 and np.isfinite(found.explained[LOGISTIC].high)


def test_without_true_probabilities_there_is_no_information(recording):
    without = replace(
        recording,
        features={name: recording.features[name] for name in ("draft_prob", "max_prob", "entropy")},
    )
    assert information([recording, without], {}, range(2 * PROMPTS)) is None


def test_a_predictor_is_fitted_on_the_other_half_of_the_groups(recording):
    """Only in the first group of each pair the logit has its sign: turned round by what was learned
    there, it loses.
    """
    first = np.arange(PROMPTS) % 2 == 0
    node = recording.labels()[0]
    prompt = recording.prompt_of(torch.arange(len(recording.tokens)))
    sign = torch.where(torch.from_numpy(first)[prompt], 1.0, -1.0)
    heads = {"turns": RecordedHead("turns", "next_token")}
    turned = replace(
        recording, features=recording.features | {"turns": sign * recording.features["knows"]}
    )
    assert information([turned], heads, range(PROMPTS)).explained["turns"].value < -1
    # Where both halves have prompts of either sign, neither learns anything.
    pairs = [number // 2 for number in range(PROMPTS)]
    assert information([turned], heads, pairs).explained["turns"].value == pytest.approx(
        0, abs=0.05
    )
    assert len(node) == information([turned], {}, pairs).num_tokens


def test_nats_are_means_over_the_tokens_of_a_resample():
    truth = torch.tensor([0.9, 0.2, 0.5], dtype=torch.float64)
    logits = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
    resamples = np.array([[1.0, 1, 1], [0, 2, 0], [0, 0, 3]])  # the third prompt has no token
    most, noise, loss = _nats(truth, logits, torch.tensor([0, 0, 1]), resamples)
    losses = [np.log1p(np.exp(-2)) + 0.1 * 2.0, np.log(2), np.log1p(np.exp(1)) - 0.5]
    assert most.tolist() == pytest.approx([entropy(1.6 / 3), entropy(0.5), 0])
    assert noise.tolist() == pytest.approx(
        [(entropy(0.9) + entropy(0.2) + entropy(0.5)) / 3, entropy(0.5), 0]
    )
    assert loss.tolist() == pytest.approx([sum(losses) / 3, losses[2], 0])
    assert _nats(truth[:1], logits[:1], torch.tensor([0]), np.ones((1, 1)))[
        1
    ].tolist() == pytest.approx([entropy(0.9)])


def test_a_head_of_whose_tokens_nothing_can_be_known_explains_nothing_of_note():
    """Only tokens after which none follows differ from the others, and it predicts for none of
    these.
    """
    made = random_recording(num_prompts=20, num_samples=1, seed=3)
    node, after, _, _ = made.labels()
    truth = torch.full((len(made.tokens),), 0.2)
    truth[node[after < 0]] = 0.9
    made.features.update({GROUND_TRUTH: truth, "head": torch.zeros(len(truth))})
    found = information([made], {"head": RecordedHead("head", "input_token")}, range(20)).explained[
        "head"
    ]
    assert all(abs(each) < 10 for each in (found.value, found.low, found.high))
