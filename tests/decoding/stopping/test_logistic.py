import math
from types import SimpleNamespace

import pytest
import torch
from fakes import drafted_length

from specheads.decoding.stopping import Logistic, logistic_inputs


def features(**values):
    return {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}


def test_inputs_come_in_the_order_of_their_names():
    values = features(max_prob=0.8, draft_prob=0.5, entropy=1.5)
    inputs = logistic_inputs(
        ["entropy", "bias", "log_draft_prob", "logit_max_prob", "max_prob"], values
    )
    assert inputs.tolist() == [pytest.approx([1.5, 1.0, math.log(0.5), math.log(4), 0.8])]
    block = {name: value.float().expand(3, 4) for name, value in values.items()}
    assert logistic_inputs(["max_prob", "bias"], block).shape == (3, 4, 2)


@pytest.mark.parametrize("certain", [0.0, 1.0])
def test_inputs_are_finite_for_distributions_with_one_certain_token(certain):
    names = ["logit_max_prob", "log_draft_prob"]
    for dtype in (torch.float32, torch.float64):
        values = {
            "max_prob": torch.tensor([certain], dtype=dtype),
            "draft_prob": torch.tensor([certain], dtype=dtype),
        }
        logit, log = logistic_inputs(names, values)[0].tolist()
        assert abs(logit) == pytest.approx(math.log(1e6), rel=1e-5)
        assert log == pytest.approx(math.log(1 - 1e-6) if certain else math.log(1e-6))


def test_a_logistic_stops_by_its_weights():
    # sigmoid(logit(0.8)) = 0.8, and 1 - 0.8^n > 0.5 first holds for n = 4
    rule = Logistic({"bias": 0.0, "logit_max_prob": 1.0}, threshold=0.5)
    assert (
        drafted_length(rule, rule.start_prompt(1, torch.device("cpu")), features(max_prob=0.8))[0]
        == 4
    )
    assert rule.needs == {"max_prob"}
    # sigmoid(2 log(0.5) + log(16)) = 0.8
    rule = Logistic({"log_draft_prob": 2.0, "entropy": 0.0, "bias": math.log(16)}, threshold=0.5)
    assert (
        drafted_length(
            rule, rule.start_prompt(1, torch.device("cpu")), features(draft_prob=0.5, entropy=3.0)
        )[0]
        == 4
    )
    assert rule.needs == {"draft_prob", "entropy"}
    assert rule.compile_key == Logistic({"bias": 1, "entropy": 2, "log_draft_prob": 3}).compile_key


LOGIT = {"logit_max_prob": 1.0}


def test_weights_that_are_left_open_are_fitted():
    fits = SimpleNamespace(logistic=lambda names: dict(zip(names, (0.5, -0.5), strict=True)))
    given = {"weights": {"max_prob": None, "bias": None}, "threshold": 0.4}
    assert Logistic.open_parameters(given) == {"weights"}
    assert Logistic.fit(given, fits) == {
        "weights": {"max_prob": 0.5, "bias": -0.5},
        "threshold": 0.4,
    }
    for weights in ({"max_prob": 1.0}, None):
        assert Logistic.open_parameters({"weights": weights}) == frozenset()
        assert Logistic.fit({"weights": weights}, fits) == {"weights": weights}
