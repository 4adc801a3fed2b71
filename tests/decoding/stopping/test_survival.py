import pytest
import torch
from fakes import constant_head, tiny_pair

from specheads import AcceptanceHead, HeadConfig, UserError
from specheads.decoding.stopping import DraftProduct, HeadThreshold


def lengths(rule, num_steps=30, batch=1, rounds=1, **features):
    """How many tokens each round drafts until every row has stopped."""
    state = rule.start_prompt(batch, torch.device("cpu"))
    stops = []
    features = {name: torch.full((batch,), value) for name, value in features.items()} | {
        "hidden": torch.zeros(batch, 1)
    }
    for _ in range(rounds):
        stopped = torch.zeros(batch, dtype=torch.long)
        for step in range(1, num_steps + 1):
            state, stop = rule.step(state, features)
            stopped = torch.where(stop & (stopped == 0), step, stopped)
        state = rule.start_round(rule.end_round(state, stopped, stopped))
        stops.append(stopped.tolist())
    return stops


# 1 - 0.8^n > 0.5 first holds for n = 4 assessed tokens
@pytest.mark.parametrize(("predicts", "expected"), [("next_token", 4), ("input_token", 5)])
def test_a_threshold_stops_once_some_rejection_is_likely(predicts, expected):
    assert lengths(HeadThreshold(constant_head(0.8, predicts), 0.5), rounds=2) == [[expected]] * 2


@pytest.mark.parametrize(("predicts", "smallest"), [("next_token", 1), ("input_token", 2)])
def test_the_default_bounds_are_those_of_the_kind(predicts, smallest):
    assert lengths(HeadThreshold(constant_head(1e-6, predicts), 0.1)) == [[smallest]]
    assert lengths(HeadThreshold(constant_head(1 - 1e-9, predicts), 0.9)) == [[20]]


def test_auto_takes_the_threshold_that_the_head_recommends():
    head = constant_head(0.8)
    for recommended in (None, {}, {"cost_ratio": 10}):
        head.config.recommended = recommended
        with pytest.raises(
            UserError,
            match=(
                r"^threshold=auto, .*specheads evaluate head=<folder>, .*, or give a number, for"
                r" example 0\.7\.$"
            ),
        ):
            HeadThreshold(head, "auto")
    head.config.recommended = {"threshold": 0.5}
    assert HeadThreshold(head, "auto").threshold == 0.5
    assert lengths(HeadThreshold(head, "auto")) == [[4]]
    with pytest.raises(UserError, match="threshold=auto"):
        HeadThreshold(constant_head(0.8), "auto")


def test_a_head_goes_to_the_drafts_device():
    pair = tiny_pair()
    head = AcceptanceHead(HeadConfig(hidden_size=pair.draft_lm.hidden_size))
    HeadThreshold(head).bind(pair, torch.device("meta"))
    assert {weight.device.type for weight in head.parameters()} == {"meta"}


def test_the_product_of_the_drafts_probabilities():
    assert lengths(DraftProduct(0.5), batch=2, rounds=2, draft_prob=0.8) == [[4, 4]] * 2
    assert lengths(DraftProduct(0.5, min_tokens=6), draft_prob=0.8) == [[6]]
    assert lengths(DraftProduct(1.0, max_tokens=7), draft_prob=0.1) == [[7]]
    assert DraftProduct().needs == {"draft_prob"}


class Fits:
    """In place of fits to a recording: they answer with fixed numbers, and keep what an automatic
    threshold was asked for.
    """

    def __init__(self):
        self.asked = []

    def auto_threshold(self, max_tokens):
        self.asked.append(max_tokens)
        return 0.25


@pytest.mark.parametrize("bounds", [{}, {"max_tokens": 7}])
def test_an_automatic_threshold_is_fitted_to_costs(bounds):
    fits = Fits()
    given = {"threshold": "auto", **bounds}
    assert HeadThreshold.open_parameters(given) == {"threshold"}
    assert HeadThreshold.fit(given, fits) == {"threshold": 0.25, **bounds}
    assert fits.asked == [bounds.get("max_tokens", 20)]
    assert (
        HeadThreshold.open_parameters({"threshold": 0.5})
        == HeadThreshold.open_parameters({})
        == frozenset()
    )
    assert HeadThreshold.fit({"threshold": 0.5}, fits) == {"threshold": 0.5}
    assert len(fits.asked) == 1
