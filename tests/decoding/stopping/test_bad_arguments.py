"""Arguments that a rule cannot take are named in one message, before anything is decoded."""

import pytest
from fakes import constant_head

from specheads import UserError
from specheads.decoding.stopping import (
    Confidence,
    DraftProduct,
    FixedLength,
    HeadThreshold,
    Logistic,
    MaxProbability,
    OnlineHead,
    OnlineLogistic,
)

LOGIT = {"logit_max_prob": 1.0}
BY_NAME = "must be numbers by name, some of logit_max_prob, .*fits those that are null"


@pytest.mark.parametrize(
    ("rule", "arguments", "message"),
    [
        (FixedLength, {"num_tokens": 0}, "num_tokens=0 must be a positive integer"),
        (FixedLength, {"num_tokens": 2.5}, "num_tokens=2.5"),
        (MaxProbability, {"threshold": 1.1}, r"threshold=1\.1"),
        (MaxProbability, {"max_tokens": 0}, "max_tokens=0"),
        (Confidence, {"threshold": "high"}, "threshold=high .*; it is a probability under the"),
        (DraftProduct, {"threshold": 1.5}, r"threshold=1\.5"),
        (Logistic, {}, f"weights=None {BY_NAME}"),
        (Logistic, {"weights": LOGIT | {"bias": None}}, BY_NAME),
        (Logistic, {"weights": {"bias": 1.0}}, BY_NAME),
        (Logistic, {"weights": [1.0]}, BY_NAME),
        (Logistic, {"weights": {"max_probability": 1.0}}, BY_NAME),
        (Logistic, {"weights": {"max_prob": "1"}}, r"weights\.max_prob=1 .*; it is a weight"),
        (Logistic, {"weights": LOGIT, "min_tokens": 3, "max_tokens": 2}, "min_tokens=3 and max_"),
        (OnlineLogistic, {"slope": None}, "slope=None"),
        (OnlineLogistic, {"intercept": float("inf")}, "intercept=inf"),
        (OnlineLogistic, {"prior": 0}, "prior=0"),
        (HeadThreshold, {"head": "outputs/heads/0"}, "^head='outputs/heads/0' must be a head, for"),
        (HeadThreshold, {"threshold": float("nan")}, "threshold=nan"),
        (HeadThreshold, {"threshold": "best"}, "threshold=best"),
        (HeadThreshold, {"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 and max_tokens=4"),
        (OnlineHead, {"prior": None}, "prior=None .*; it is the weight of the head at the start"),
        (OnlineHead, {"threshold": "auto"}, "recommends none"),
    ],
)
def test_a_bad_argument_is_named(rule, arguments, message):
    head = {"head": constant_head(0.5)} if rule.uses_head else {}
    with pytest.raises(UserError, match=message):
        rule(**head | arguments)
