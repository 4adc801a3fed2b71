"""How well a calibration does on prompts that it was not fitted on, and which form is best."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._pytree import tree_map

from specheads.heads.calibration import FORMS, NUM_INDICES, IndexCalibration, Indices
from specheads.heads.metrics import calibration
from specheads.replay.calibration import compared

NUM_PROMPTS = 40
NUM_TOKENS = 100


def tokens(seed=0, spread=0.3, true=None):
    """Return random logits, acceptances, indices and prompts, which differ in their acceptance
    rates.

    With `true`, a function of logits and indices, acceptance has its logits instead.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.arange(NUM_PROMPTS).repeat_interleave(NUM_TOKENS)
    rate = 0.5 + spread * (2 * torch.rand(NUM_PROMPTS, generator=generator) - 1)
    logits = torch.randn(len(prompt), generator=generator, dtype=torch.float64)
    furthest = torch.randint(12, (len(prompt),), generator=generator)
    probs = rate[prompt] if true is None else torch.sigmoid(true(logits, furthest))
    accepted = torch.rand(len(prompt), generator=generator) < probs
    return logits, accepted, Indices.up_to(furthest), prompt


def ece(fitted, logits, accepted, indices):
    token, index = indices.pairs()
    return calibration(torch.sigmoid(fitted(logits[token], index)), accepted[token].double()).ece


@pytest.mark.parametrize("seed", range(5))
def test_a_head_that_is_noise_looks_calibrated_on_its_own_prompts_alone(seed):
    *given, prompt = tokens(seed)
    raw, within = (
        ece(each, *given) for each in (IndexCalibration.neutral(), IndexCalibration.fit(*given))
    )
    found = compared(*given, prompt, range(NUM_PROMPTS))
    assert within < 0.03 and raw > 0.15 and found.ece["raw"] == pytest.approx(raw)
    assert within < found.ece["cross_fitted"] < raw and found.used


@pytest.mark.parametrize(
    ("true", "best"),
    [
        (lambda logits, furthest: 0.4 * logits, ("temperature", "temperatures by index")),
        (lambda logits, furthest: logits - 1, ("Platt", "Platt by index")),
    ],
)
def test_the_form_of_the_lowest_loss_on_other_prompts_is_taken(true, best):
    found = compared(*tokens(true=true), range(NUM_PROMPTS))
    assert (
        found.used and found.best in best and found.log_loss["cross_fitted"] < found.log_loss["raw"]
    )


def test_a_calibration_that_is_right_is_not_replaced():
    given = tokens(true=lambda logits, furthest: 0.4 * logits)
    earlier = IndexCalibration([0.4], [0.0])
    found = compared(*given, range(NUM_PROMPTS), earlier)
    assert (
        not found.used
        and found.ece["before"] < found.ece["raw"]
        and found.log_loss["before"] < found.log_loss["raw"]
    )
    assert compared(*given, range(NUM_PROMPTS), IndexCalibration([3.0], [0.0])).used


def test_opposite_errors_of_the_halves_do_not_cancel():
    """Even prompts accept 6 of 10 tokens, odd ones 4: the calibration of one half is 0.2 too high
    or too low on the other.
    """
    logits, _, indices, prompt = tokens()
    place = torch.arange(len(prompt)) % 10
    accepted = torch.where(prompt % 2 == 0, place < 6, place < 4)
    found = compared(
        torch.zeros_like(logits),
        accepted,
        Indices.up_to(torch.zeros_like(indices.furthest)),
        prompt,
        range(NUM_PROMPTS),
    )
    # Without intercepts zero stays zero, and a half; with them the other half's rates would do
    # worse.
    assert found.best.startswith("temperature") and not found.used
    assert found.ece["raw"] == pytest.approx(0, abs=1e-6) and found.ece[
        "cross_fitted"
    ] == pytest.approx(0.1, abs=1e-6)


def test_losses_are_those_of_the_other_halfs_calibration():
    *given, prompt = tokens(true=lambda logits, furthest: logits - 1)
    even = prompt % 2 == 0
    found = compared(*given, prompt, range(NUM_PROMPTS))
    total = 0.0
    count = 0
    error = 0.0
    for half in (even, ~even):
        others = tree_map(lambda part, rows=~half: part[rows], given)
        fitted = IndexCalibration.fit(*others, *FORMS[found.best])
        logits, accepted, indices = tree_map(lambda part, rows=half: part[rows], given)
        token, index = indices.pairs()
        loss = binary_cross_entropy_with_logits(
            fitted(logits[token], index), accepted[token].double(), reduction="sum"
        )
        total = total + loss.item()
        count = count + len(token)
        error += len(token) * ece(fitted, logits, accepted, indices)
    assert found.ece["cross_fitted"] == pytest.approx(error / count)
    assert found.log_loss["cross_fitted"] == pytest.approx(total / count)
    assert count == int((given[2].furthest + 1).clamp_max(NUM_INDICES).sum())


def test_prompts_of_a_group_are_one_observation():
    """Of ten alike prompts each, groups accept 90 or 40 % of tokens: what most gain, as many would
    lose in another sample.
    """
    group = torch.arange(80) // 10
    prompt = torch.arange(80).repeat_interleave(100)
    rate = torch.tensor([90, 90, 40, 40, 90, 90, 40, 40])[group[prompt]]
    given = (
        torch.zeros(8000, dtype=torch.float64),
        torch.arange(8000) % 100 < rate,
        Indices.up_to(torch.zeros(8000, dtype=torch.long)),
        prompt,
    )
    assert compared(*given, range(80)).used
    by_group = compared(*given, group.tolist())
    assert (
        not by_group.used
        and by_group.best == "Platt"
        and by_group.ece["cross_fitted"] < by_group.ece["raw"]
    )


def test_a_calibration_is_replaced_only_if_both_figures_beat_its_own():
    """Not those of the head as it is, which is worse than either."""
    given = tokens(true=lambda logits, furthest: 0.4 * logits - 2)
    near = compared(*given, range(NUM_PROMPTS), IndexCalibration([0.4], [-1.9]))
    assert near.ece["cross_fitted"] < near.ece["before"] and not near.used  # no clearly lower loss
    logits, *others = opposite_errors()
    shrunk = compared(logits / 4, *others, range(NUM_PROMPTS), IndexCalibration([4.0], [0.0]))
    assert shrunk.log_loss["cross_fitted"] < shrunk.log_loss["before"] and not shrunk.used
    assert shrunk.ece["before"] < shrunk.ece["cross_fitted"] < shrunk.ece["raw"]


def opposite_errors():
    """Halves of the prompts err by 0.12 in opposite directions, while the slope of both is wrong:
    that is worth more nats.
    """
    generator = torch.Generator().manual_seed(0)
    prompt = torch.arange(NUM_PROMPTS).repeat_interleave(NUM_TOKENS)
    sign = torch.where(torch.arange(len(prompt)) % 2 == 0, 1.0, -1.0).double()
    shift = torch.where(prompt % 2 == 0, 0.12, -0.12)
    accepted = torch.rand(len(prompt), generator=generator) < 0.5 + 0.35 * sign + shift
    indices = Indices.up_to(torch.full_like(prompt, NUM_INDICES - 1))
    return 1.2 * sign, accepted, indices, prompt
