"""Other losses for heads, against sums by hand."""

import math

import pytest
import torch

from benchmarks.head_objectives import MEAN_ACCEPTANCE, PRICE, SHARPNESS, before_in_text, calibrated, focal, throughput
from specheads.heads.batch import HeadBatch
from specheads.training.heads.head_loss import weighted_bce

# One token after a response, a rollout of three tokens, a rollout of two.
ROW = [0, 1, 1, 1, 2, 2]
ACCEPTANCE = [0.4, 0.9, 0.5, 1.0, 0.2, 0.8]


@pytest.fixture
def batch():
    of_response = [0.4] + [math.nan] * 5
    alive = [1.0, 1.0, 0.9, 0.45, 1.0, 0.2]
    none = torch.zeros(6, dtype=torch.long)
    return HeadBatch(
        tokens=none[None],
        row=torch.tensor(ROW),
        index=none,
        drafted=none,
        labels={"sampled": torch.tensor(of_response), "rollout": torch.tensor(ACCEPTANCE)},
        start=none,
        alive=torch.tensor(alive),
    )


@pytest.fixture
def logits():
    return torch.tensor([0.3, 1.2, -0.4, 0.8, -1.0, 0.1], dtype=torch.float64, requires_grad=True)


def test_a_focal_loss_is_cross_entropy_times_the_square_of_what_is_missing(logits, batch):
    labels = torch.tensor(ACCEPTANCE, dtype=torch.float64)
    chance = logits.sigmoid()
    expected = -(labels * (1 - chance) ** 2 * chance.log() + (1 - labels) * chance**2 * (1 - chance).log()).sum()
    total, weight = focal(logits, labels, batch)
    assert total.item() == pytest.approx(expected.item()) and weight == 6


def test_the_calibration_error_is_added_by_bin(logits, batch):
    labels = torch.tensor([0.0, math.nan, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    total, weight = calibrated(logits, labels, batch)
    chances = logits.sigmoid().tolist()
    errors = {}
    for chance, label in zip(chances, labels.tolist(), strict=True):
        if not math.isnan(label):
            errors[int(chance * 15)] = errors.get(int(chance * 15), 0) + chance - label
    plain, _ = weighted_bce(logits, labels)
    assert (total - plain).item() == pytest.approx(sum(map(abs, errors.values()))) and weight == 5


def test_sums_begin_again_with_every_text():
    first = torch.tensor([True, False, False, True, False])
    assert before_in_text(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), first).tolist() == [0, 1, 3, 0, 8]


def test_the_throughput_is_that_of_soft_decisions_in_rollouts(logits, batch):
    labels = torch.tensor(ACCEPTANCE, dtype=torch.float64)
    total, weight = throughput(logits, labels, batch)
    worth = 0.0
    for text in (1, 2):
        places = [place for place, row in enumerate(ROW) if row == text]
        survival, drafted, alive = 1.0, 1.0, 1.0
        for number, place in enumerate(places):
            if number:
                going = SHARPNESS * (math.log(survival) + math.log(MEAN_ACCEPTANCE / PRICE))
                drafted *= 1 / (1 + math.exp(-going))
            alive *= ACCEPTANCE[place]
            worth += drafted * (alive - PRICE)
            survival *= torch.sigmoid(logits[place]).item()
    plain, _ = weighted_bce(logits, labels)
    assert (total - plain).item() == pytest.approx(-worth * 6 / 2, rel=1e-6) and weight == 6
    total.backward()
    assert logits.grad.isfinite().all() and logits.grad.abs().min() > 0
