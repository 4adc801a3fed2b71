"""Temperatures by index that calibrate products, to which the calibration of heads is compared."""

import numpy as np
import pytest
import torch

from benchmarks.read_outs import error_samples, log_chances, product_errors, sequential_temperatures
from specheads.heads.calibration import IndexCalibration
from specheads.replay.drafts import DraftLogits


def drafts(count, slopes, seed=0):
    """Drafts whose tokens are accepted with the sigmoid of slope x logit; all tokens of a draft share a part of their logits."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, len(slopes))
    logits = 1 + torch.randn(count, 1, generator=generator, dtype=torch.float64) + torch.randn(shape, generator=generator)
    accepted = torch.rand(shape, generator=generator) < torch.sigmoid(logits * torch.tensor(slopes))
    length = torch.randint(1, len(slopes) + 1, (count, 1), generator=generator)
    return DraftLogits(logits, accepted.cummin(dim=1).values, torch.arange(len(slopes)) < length)


def test_temperatures_are_those_that_the_samples_have():
    """30,000 drafts at a fixed seed; over six other seeds the standard deviations were at most 0.031, and the bound is five."""
    slopes = [0.5, 1.0, 0.6]
    fitted = sequential_temperatures(drafts(30_000, slopes))
    assert fitted.slope == pytest.approx(slopes, abs=0.155) and fitted.intercept == [0.0] * 3


def test_temperatures_reduce_the_error_of_products_on_other_drafts():
    """The logits are twice too large; the errors of 15 exact bins of 4,000 to 20,000 samples are about 0.01 to 0.02."""
    fitted, others = sequential_temperatures(drafts(20_000, [0.5] * 5)), drafts(20_000, [0.5] * 5, 1)
    before, after = (product_errors(log_chances(each, others).cumsum(1), others) for each in (IndexCalibration.neutral(), fitted))
    assert min(before) > 0.09 and max(after) < 0.03


def test_an_index_that_no_draft_reached_has_the_last_temperature():
    some = drafts(500, [0.5, 0.5, 0.5])
    fitted = sequential_temperatures(DraftLogits(some.logits, some.survived, some.known & (torch.arange(3) < 2)))
    assert len(fitted.slope) == 2 and fitted(torch.ones(1), torch.tensor([7])).item() == pytest.approx(fitted.slope[1])
    none = DraftLogits(some.logits, some.survived, torch.zeros_like(some.known))
    assert sequential_temperatures(none) == IndexCalibration.neutral()


def test_resampled_errors_are_those_of_the_repeated_drafts_and_the_first_is_the_error_itself():
    some = drafts(900, [0.5, 1.0])
    prompt, products = torch.arange(900) % 3, log_chances(IndexCalibration.neutral(), some).cumsum(1)
    resamples = np.array([[1, 1, 1], [2, 2, 2], [1, 0, 0]])
    samples = error_samples(products, some, prompt, resamples)
    assert samples[0] == pytest.approx(np.mean(product_errors(products, some))) and samples[1] == pytest.approx(samples[0])
    assert abs(samples[2] - samples[0]) > 1e-3
