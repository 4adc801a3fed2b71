"""Calibration by index in the round: fitted to samples, stored in a head's config, applied by the
rules that use the head.
"""

from dataclasses import replace

import pytest
import torch
from fakes import constant_head
from torch import Tensor

from specheads.decoding.stopping import HeadThreshold
from specheads.errors import UserError
from specheads.heads.calibration import NUM_INDICES, IndexCalibration, Indices
from specheads.heads.head import AcceptanceHead, HeadConfig
from specheads.heads.metrics import fit_logistic
from specheads.replay.head_scores import head_fingerprint
from specheads.replay.replay import recorded_head

TRUE = IndexCalibration([0.5, 0.7, 1.5, 1.0], [-0.5, 0.0, 0.25, 1.0])
CPU = torch.device("cpu")


def samples(
    count: int, ground_truth: IndexCalibration = TRUE, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of tokens, whether they were accepted, sampled from `ground_truth`, and the index of
    each token.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(count, generator=generator, dtype=torch.float64) + 0.5
    index = torch.randint(len(ground_truth.slope), (count,), generator=generator)
    return (
        logits,
        torch.rand(count, generator=generator) < torch.sigmoid(ground_truth(logits, index)),
        index,
    )


# --- fitting


def test_each_index_gets_a_separate_slope_and_intercept():
    """Index j has 20,000 samples of the ground truth at j. Standard errors are below 0.03.

    The bound is five of them.
    """
    for index in range(4):
        logits, accepted, _ = samples(
            20_000,
            IndexCalibration(TRUE.slope[index : index + 1], TRUE.intercept[index : index + 1]),
        )
        indices = Indices.up_to(torch.full((20_000,), index))
        fitted = IndexCalibration.fit(logits, accepted, indices, num_indices=4, prior=1.0)
        assert len(fitted.slope) == len(fitted.intercept) == 4
        assert fitted.slope[index] == pytest.approx(TRUE.slope[index], abs=0.15)
        assert fitted.intercept[index] == pytest.approx(TRUE.intercept[index], abs=0.15)


def test_a_token_is_a_sample_of_every_index_that_it_can_have():
    """With a negligible prior, the logistic of index j is fitted to all tokens that can have this
    index.
    """
    logits, accepted, furthest = samples(4000)
    indices = Indices.up_to(furthest)
    fitted = IndexCalibration.fit(logits, accepted, indices, num_indices=4, prior=1e-6)
    for index in range(4):
        at_index = furthest >= index
        slope, intercept = fit_logistic(
            logits[at_index, None], accepted[at_index].double()
        ).tolist()
        assert (fitted.slope[index], fitted.intercept[index]) == pytest.approx(
            (slope, intercept), abs=1e-4
        )
    assert max(fitted.slope) - min(fitted.slope) > 0.2  # or this would show nothing


def test_a_form_without_indices_counts_a_token_at_every_index_that_it_can_have():
    logits, accepted, index = samples(4000)
    indices = Indices.up_to(3 * index)  # up to 9, of which the last are one
    token, _ = indices.pairs()
    fitted = IndexCalibration.fit(logits, accepted, indices, num_indices=1, prior=1e-6)
    expected = fit_logistic(logits[token, None], accepted[token].double()).tolist()
    assert [*fitted.slope, *fitted.intercept] == pytest.approx(expected, abs=1e-5)
    two = IndexCalibration.fit(logits, accepted, Indices.up_to(index), num_indices=2, prior=1e-6)
    later = fit_logistic(logits[index > 0, None], accepted[index > 0].double()).tolist()
    assert [two.slope[1], two.intercept[1]] == pytest.approx(later, abs=1e-4)


def test_an_index_with_few_samples_stays_close_to_all_tokens_and_without_samples_to_the_head():
    logits, accepted, furthest = samples(4000)
    # Twelve tokens reach index 2, none of them accepted
    few = torch.where(torch.arange(4000) < 12, 2, 0)
    accepted = accepted & (few == 0)
    indices = Indices.up_to(few)
    fitted = IndexCalibration.fit(logits, accepted, indices, num_indices=4, prior=1000)
    alone = fit_logistic(logits[few == 2, None], accepted[few == 2].double())
    assert abs(alone[1]) > 10  # what twelve rejections say by themselves
    assert (
        abs(fitted.intercept[2] - fitted.intercept[0]) < 0.15
        and abs(fitted.slope[2] - fitted.slope[0]) < 0.15
    )
    assert (fitted.slope[3], fitted.intercept[3]) == pytest.approx(
        (fitted.slope[0], fitted.intercept[0]), abs=0.1
    )
    believed = IndexCalibration.fit(logits, accepted, Indices.up_to(furthest), prior=1e9)
    assert believed.slope == pytest.approx([1.0] * NUM_INDICES, abs=1e-4)
    assert believed.intercept == pytest.approx([0.0] * NUM_INDICES, abs=1e-4)


# --- applying


def with_calibration(predicts: str, values: dict | None, prob: float = 0.8):
    head = constant_head(prob, predicts)
    head.config.calibration = values
    return head


def test_tokens_are_counted_at_every_index_up_to_their_largest():
    row, index = Indices.up_to(torch.tensor([0, 2, 9])).pairs(num_indices=4)
    assert list(zip(row.tolist(), index.tolist(), strict=True)) == [
        (0, 0),
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
        (2, 1),
        (2, 2),
        (2, 3),
    ]


@pytest.mark.parametrize("predicts", ["next_token", "input_token"])
def test_rules_take_the_calibration_at_the_predicted_tokens_index(predicts):
    """A chance of 0.8 becomes sigmoid(slope x logit + intercept) at the token's index.

    Input_token heads predict a step later.
    """
    rule = HeadThreshold(with_calibration(predicts, TRUE.to_dict()))
    logit = torch.tensor(0.8, dtype=torch.float64).logit()
    chances = torch.sigmoid(TRUE(logit.expand(7), torch.arange(7)))
    expected = ([1.0] if predicts == "input_token" else []) + chances.tolist()
    state = rule.start_prompt(2, CPU)
    for _ in range(2):  # rounds: the second begins at index 0 again
        survival = 1.0
        for chance in expected[:6]:
            state, _ = rule.step(state, {"hidden": torch.zeros(2, 1)})
            survival *= chance
            assert state.survival.tolist() == pytest.approx([survival] * 2)
        state = rule.start_round(rule.end_round(state, torch.tensor([6, 6]), torch.tensor([6, 6])))


@pytest.mark.parametrize("predicts", ["next_token", "input_token"])
def test_no_calibration_equals_the_neutral_calibration_bit_by_bit(predicts):
    torch.manual_seed(0)
    head = (
        AcceptanceHead(HeadConfig(8, 1, predicts, inputs=("hidden",))).eval().requires_grad_(False)
    )
    torch.nn.init.normal_(head.readout.weight)
    runs = []
    for values in (
        None,
        IndexCalibration.neutral().to_dict(),
        IndexCalibration([1.0] * 8, [0.0] * 8).to_dict(),
    ):
        head.config = replace(head.config, calibration=values)
        generator = torch.Generator().manual_seed(1)
        single = HeadThreshold(head)
        state = single.start_prompt(16, CPU)
        survivals = []
        for _ in range(12):
            features = {"hidden": torch.randn(16, 8, generator=generator)}
            before = state.survival
            state, stop = single.step(state, features)
            survivals.append((state.survival, stop))
            if predicts == "next_token":
                assert torch.equal(state.survival, before * torch.sigmoid(head(features)))
        runs.append(survivals)
    for other in runs[1:]:
        for (survival, stop), (same, also) in zip(runs[0], other, strict=True):
            assert torch.equal(survival, same) and torch.equal(stop, also)


# --- in a head's config


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 0.0],
        {"slope": [1.0]},
        {"slope": [1.0], "intercept": [0.0], "more": [0.0]},
        {"slope": [1.0, 1.0], "intercept": [0.0]},
        {"slope": [], "intercept": []},
        {"slope": ["1"], "intercept": [0.0]},
        {"slope": [True], "intercept": [0.0]},
        {"slope": [float("nan")], "intercept": [0.0]},
        {"slope": [1.0], "intercept": [float("inf")]},
    ],
    ids=str,
)
def test_anything_else_is_refused(values):
    with pytest.raises(UserError, match=r"the calibration .* must be slope and intercept"):
        IndexCalibration.from_dict(values)


def test_a_calibration_does_not_change_the_metrics_of_a_head():
    head = AcceptanceHead(HeadConfig(8, 1))
    raw = recorded_head(head)
    before = head_fingerprint(head)
    head.config = replace(head.config, calibration=TRUE.to_dict())
    assert head_fingerprint(head) == before and recorded_head(head).name == raw.name
    # But what is tuned for one is not the other's
    assert recorded_head(head) != raw and recorded_head(head) == recorded_head(head)
