import pytest
import torch
from statistics_helper import chi_square_p_value, uniforms

from specheads import UserError, Warp
from specheads.pair.sampling import accept_prob, check_finite, has_nan, sample


def test_caches_and_heads_from_before_min_p_have_the_values_of_a_warp_without_it():
    assert Warp(0.7, 50).values() == {"temperature": 0.7, "top_k": 50, "top_p": 1.0}
    assert Warp(0.7, 50, min_p=0.1).values() == {
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 1.0,
        "min_p": 0.1,
    }


def test_half_precision_logits_become_float32_before_the_softmax():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    probs = Warp()(logits)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, logits.float().softmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_logit_makes_its_row_nan_and_no_other(temperature):
    logits = torch.zeros(2, 5)
    logits[1, 3] = torch.nan
    probs = Warp(temperature, top_k=2)(logits)
    assert not probs[0].isnan().any()
    assert probs[1].isnan().any()


@pytest.mark.parametrize(
    "warp",
    [Warp(), Warp(temperature=0), Warp(0.7, top_k=2), Warp(top_p=0.5), Warp(top_k=3, min_p=0.5)],
)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_distribution_of_nan_logits_is_found_by_any_of_its_places(warp, place):
    logits = torch.arange(10.0).reshape(2, 5)
    logits[1, place] = torch.nan
    assert has_nan(warp(logits)).tolist() == [False, True]
    with pytest.raises(UserError, match="nano produced NaN"):
        check_finite("nano", warp(logits))
    check_finite("nano", warp(logits[:1]))


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -2},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 1.1},
    ],
)
def test_values_outside_their_range_are_refused_by_name(bad):
    with pytest.raises(UserError, match=f"{next(iter(bad))}=.* must be"):
        Warp(**bad)


def test_samples_follow_their_distribution():
    probs = torch.rand(30, generator=torch.Generator().manual_seed(0))
    probs[::5] = 0
    tokens = sample(
        probs.expand(200_000, 30), uniforms((200_000,), torch.Generator().manual_seed(1))
    )
    # false alarm with probability 1e-6
    assert (
        chi_square_p_value(
            torch.bincount(tokens, minlength=30), probs.double() / probs.double().sum()
        )
        > 1e-6
    )


def test_accept_prob_has_no_zero_division():
    t = torch.tensor([0.2, 0.5, 0.0, 0.3, 0.0])
    d = torch.tensor([0.4, 0.25, 0.1, 0.0, 0.0])
    assert accept_prob(t, d).tolist() == [0.5, 1.0, 0.0, 0.0, 0.0]
