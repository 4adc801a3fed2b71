"""Settings say what is wrong with a value in one message, list their fields, and give the values
that decide numbers.
"""

from dataclasses import dataclass

import pytest

from specheads.data_gen.settings import DataGeneration
from specheads.errors import UserError
from specheads.settings import (
    Built,
    Count,
    Flag,
    OneOrMore,
    PositiveNumber,
    Settings,
    argument,
    cache_key,
    fields_of,
    setting,
)
from specheads.training.heads.settings import HeadTraining


@dataclass(frozen=True)
class Shape:
    """A shape."""

    width: int | None = argument(None, "how wide it is, or null for the usual width")
    height: int = argument(1, "how high it is")


class Inner(Settings):
    size: OneOrMore[Count] = setting(1, "the number of things")
    loud: Flag = setting(False, "true: with noise", decides=False)


class Outer(Settings):
    rate: PositiveNumber = setting(1.0, "the rate of things", key="group.rate")
    inner: Inner | None = setting(Inner(), "what is inside")
    shape: Built[Shape] = setting(Shape(), "a shape")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 0}, "group.rate=0 must be a finite number above 0; it is the rate of things."),
        ({"inner": 5}, "inner=5 must be a set of keys; it is what is inside."),
        (
            {"inner": {"size": -1}},
            "inner.size=-1 must be a non-negative integer; it is the number of things.",
        ),
        (
            {"inner": {"size": 2**40}},
            "inner.size=1099511627776 must be at most 2147483647; it is the number of things.",
        ),
        ({"inner": {"loud": 1}}, "inner.loud=1 must be true or false (true: with noise)."),
        ({"inner": {"noise": None}}, "inner.noise=null is not known; expected one of size, loud."),
        ({"other": [1, 2]}, "other=[1,2] is not known; expected one of group.rate, inner, shape."),
        (
            {"shape": {"depth": 1}},
            (
                "shape={'depth': 1} has the unknown key depth; the keys are width, height; it is a"
                " shape."
            ),
        ),
    ],
)
def test_a_mistake_is_one_message(values, message):
    with pytest.raises(UserError) as caught:
        Outer(**values)
    assert str(caught.value) == message


def test_values_stay_as_they_are_given():
    # Cache keys tell them apart.
    assert repr(Outer(rate=1).rate) == "1" and repr(Outer(rate=1.0).rate) == "1.0"
    assert Outer(inner={"size": [1, 2]}).inner.size == (1, 2)
    assert Outer(shape={"height": 3}).shape == Shape(None, 3)
    assert Outer().but(rate=2) == Outer(rate=2)


def test_fields_are_listed_with_their_help():
    fields = fields_of(Outer)
    assert list(fields) == [
        "group.rate",
        "inner",
        "inner.size",
        "inner.loud",
        "shape",
        "shape.width",
        "shape.height",
    ]
    assert fields["shape.width"] == "how wide it is, or null for the usual width"


def test_a_cache_key_has_what_decides_numbers():
    assert cache_key(Outer(rate=2)) == {
        "group.rate": 2,
        "inner.size": 1,
        "shape": cache_key(Outer())["shape"],
    }
    base = HeadTraining()
    same = [base.but(features_budget=0), base.but(calibration=None)]
    other = [
        base.but(seed=1),
        base.but(loader={"batch_size": 3}),
        base.but(trainer={"max_epochs": 3}),
    ]
    other += [base.but(mixing={"response_share": 0.5}), base.but(optimizer={"lr": 1e-4})]
    assert all(settings.cache_key() == base.cache_key() for settings in same)
    assert all(settings.cache_key() != base.cache_key() for settings in other)


def test_keys_of_caches_have_the_names_of_earlier_versions():
    sizes = {
        "max_new_tokens": 512,
        "max_prompt_tokens": 1024,
        "batch_size": 64,
        "rows_per_shard": 512,
    }
    sizes |= {"responses_per_prompt": 1, "draws_per_position": 4}
    assert DataGeneration().sizes() == sizes
