"""Which calibration a head gets, and how well one does on prompts that it was not fitted on."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from specheads.heads.calibration import FORMS, NUM_INDICES, IndexCalibration, in_rounds
from specheads.heads.metrics import calibration
from specheads.training.heads.calibrate import compared

NUM_PROMPTS, NUM_TOKENS = 40, 100


def tokens(seed=0, spread=0.3, true=None):
    """Return random logits, acceptances, largest indices and prompts, which differ in their acceptance rates.

    With `true`, a function of logits and indices, acceptance has its logits instead.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.arange(NUM_PROMPTS).repeat_interleave(NUM_TOKENS)
    rate = 0.5 + spread * (2 * torch.rand(NUM_PROMPTS, generator=generator) - 1)
    logits = torch.randn(len(prompt), generator=generator, dtype=torch.float64)
    furthest = torch.randint(12, (len(prompt),), generator=generator)
    probs = rate[prompt] if true is None else torch.sigmoid(true(logits, furthest))
    return logits, torch.rand(len(prompt), generator=generator) < probs, furthest, prompt


def ece(fitted, logits, accepted, furthest):
    token, index = in_rounds(furthest)
    return calibration(torch.sigmoid(fitted(logits[token], index)), accepted[token].double()).ece


@pytest.mark.parametrize("seed", range(5))
def test_a_head_that_is_noise_looks_calibrated_on_its_own_prompts_alone(seed):
    *given, prompt = tokens(seed)
    raw, within = (ece(each, *given) for each in (IndexCalibration.neutral(), IndexCalibration.fit(*given)))
    found = compared(*given, prompt, range(NUM_PROMPTS))
    assert within < 0.03 and raw > 0.15 and found.ece["raw"] == pytest.approx(raw)
    assert within < found.ece["cross_fitted"] < raw and found.used


@pytest.mark.parametrize("seed", range(5))
def test_a_head_that_is_right_stays_as_it_is(seed):
    found = compared(*tokens(seed, true=lambda logits, furthest: logits), range(NUM_PROMPTS))
    assert not found.used and found.log_loss["cross_fitted"] == pytest.approx(found.log_loss["raw"], abs=3e-3)


@pytest.mark.parametrize(
    ("true", "best"),
    [
        (lambda logits, furthest: 0.4 * logits, ("temperature", "temperatures by index")),
        (lambda logits, furthest: logits - 1, ("Platt", "Platt by index")),
    ],
)
def test_the_form_of_the_lowest_loss_on_other_prompts_is_taken(true, best):
    found = compared(*tokens(true=true), range(NUM_PROMPTS))
    assert found.used and found.best in best and found.log_loss["cross_fitted"] < found.log_loss["raw"]


def test_a_calibration_that_is_right_is_not_replaced():
    given = tokens(true=lambda logits, furthest: 0.4 * logits)
    earlier = {"slope": [0.4], "intercept": [0.0]}
    found = compared(*given, range(NUM_PROMPTS), earlier)
    assert not found.used and found.ece["before"] < found.ece["raw"] and found.log_loss["before"] < found.log_loss["raw"]
    assert compared(*given, range(NUM_PROMPTS), {"slope": [3.0], "intercept": [0.0]}).used


def test_opposite_errors_of_the_halves_do_not_cancel():
    """Even prompts accept 6 of 10 tokens, odd ones 4: the calibration of one half is 0.2 too high or too low on the other."""
    logits, _, furthest, prompt = tokens()
    place = torch.arange(len(prompt)) % 10
    accepted = torch.where(prompt % 2 == 0, place < 6, place < 4)
    found = compared(torch.zeros_like(logits), accepted, torch.zeros_like(furthest), prompt, range(NUM_PROMPTS))
    # Without intercepts zero stays zero, and a half; with them the other half's rates would do worse.
    assert found.best.startswith("temperature") and not found.used
    assert found.ece["raw"] == pytest.approx(0, abs=1e-6) and found.ece["cross_fitted"] == pytest.approx(0.1, abs=1e-6)


def test_losses_are_those_of_the_other_halfs_calibration():
    *given, prompt = tokens(true=lambda logits, furthest: logits - 1)
    even, found, total, count = prompt % 2 == 0, compared(*given, prompt, range(NUM_PROMPTS)), 0.0, 0
    for half in (even, ~even):
        fitted = IndexCalibration.fit(*(part[~half] for part in given), *FORMS[found.best])
        logits, accepted, furthest = (part[half] for part in given)
        token, index = in_rounds(furthest)
        loss = binary_cross_entropy_with_logits(fitted(logits[token], index), accepted[token].double(), reduction="sum")
        total, count = total + loss.item(), count + len(token)
    assert found.log_loss["cross_fitted"] == pytest.approx(total / count)
    assert count == int((given[2] + 1).clamp_max(NUM_INDICES).sum())


@pytest.mark.parametrize("size", [1, 5])
def test_no_prompt_of_a_group_is_on_both_sides(size, monkeypatch):
    """A prompt's number is its logit; each file has some prompts in a row."""
    _, accepted, furthest, prompt = tokens()
    sides, real = [], IndexCalibration.fit.__func__

    def fit(cls, logits, *rest):
        sides.append({int(number) // size for number in logits.unique()})
        return real(cls, logits, *rest)

    monkeypatch.setattr(IndexCalibration, "fit", classmethod(fit))
    compared(prompt.double(), accepted, furthest, prompt, [f"file{number // size}.py" for number in range(NUM_PROMPTS)])
    for first, other in zip(sides[::2], sides[1::2], strict=True):
        assert not first & other and len(first) == len(other) == NUM_PROMPTS // size // 2
